/**
 * Twins of monarch_lab/wire/snapshot.py, field by field, and the messages around them.
 * Times are seconds, sizes bytes.
 */

export const PROCESS_STATES = ['starting', 'idle', 'busy', 'debugging', 'lost', 'exited'] as const;
export const MESH_STATES = ['starting', 'live', 'dead', 'closed'] as const;
export const DEBUGGER_STATES = ['paused', 'attached', 'held', 'detached'] as const;

export type ProcessState = (typeof PROCESS_STATES)[number];
export type MeshState = (typeof MESH_STATES)[number];
export type DebuggerState = (typeof DEBUGGER_STATES)[number];

export interface ProcessSnapshot {
  rank: number;
  label: string;
  host: string;
  pid: number;
  state: ProcessState;
  rss_bytes: number;
  device_bytes: number;
  cpu_s: number;
  pending_ops: number;
  op: string;
  op_age_s: number;
  exit: string;
}

/** One stopped thread of a worker; 'held': the panel asks for its lines. */
export interface DebuggerSnapshot {
  name: string;
  rank: number;
  label: string;
  state: DebuggerState;
  file: string;
  line: number;
  function: string;
  source: string;
  why: string;
  prompt: string;
}

export interface MeshSnapshot {
  name: string;
  state: MeshState;
  dims: [string, number][];
  device: string;
  processes: ProcessSnapshot[];
  age_s: number;
  ops: number;
  note: string;
  debuggers: DebuggerSnapshot[];
}

export interface KernelSnapshot {
  seq: number;
  current: string;
  meshes: MeshSnapshot[];
}

/** Kernel to panel. */
export type FromKernel =
  | { op: 'snapshot'; snapshot: KernelSnapshot }
  | { op: 'debug_text'; mesh: string; session: string; text: string; prompt: string }
  | { op: 'failed'; command: string; mesh: string; text: string }
  | { op: 'pong'; thread: string };

/** Panel to kernel. */
export type ToKernel =
  | { op: 'sync' }
  | { op: 'ping' }
  | { op: 'interrupt'; mesh: string }
  | { op: 'stop'; mesh: string }
  | { op: 'debug_attach'; mesh: string; session: string }
  | { op: 'debug_line'; mesh: string; session: string; line: string }
  | { op: 'debug_detach'; mesh: string; session: string };
