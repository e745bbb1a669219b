/** Numbers as a person reads them. */

import { ProcessSnapshot } from './protocol';

const UNITS = ['B', 'KiB', 'MiB', 'GiB', 'TiB'];

export function formatBytes(bytes: number): string {
  let unit = 0;
  while (bytes >= 1024 && unit < UNITS.length - 1) {
    bytes /= 1024;
    unit += 1;
  }
  return `${bytes < 10 && unit > 0 ? bytes.toFixed(1) : bytes.toFixed(0)} ${UNITS[unit]}`;
}

export function formatAge(seconds: number): string {
  if (seconds < 1) {
    return `${Math.round(seconds * 1000)} ms`;
  }
  if (seconds < 60) {
    return `${seconds.toFixed(0)} s`;
  }
  const minutes = Math.floor(seconds / 60);
  return minutes < 60 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

/** What a process is at, in few words: its op and how long it has been at it, or how it ended. */
export function formatActivity(process: ProcessSnapshot): string {
  if (process.exit) {
    return process.exit;
  }
  return process.op ? `${process.op} · ${formatAge(process.op_age_s)}` : '';
}

export function formatDetails(process: ProcessSnapshot): string {
  const parts = [`pid ${process.pid}`, formatBytes(process.rss_bytes)];
  if (process.device_bytes > 0) {
    parts.push(`${formatBytes(process.device_bytes)} on device`);
  }
  if (process.pending_ops > 0) {
    parts.push(`${process.pending_ops} pending`);
  }
  return parts.join(' · ');
}

export function plural(count: number, noun: string, nouns = `${noun}s`): string {
  return `${count} ${count === 1 ? noun : nouns}`;
}
