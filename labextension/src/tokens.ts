/** Names that others rely on: the kernel, the command palette, tests and a user's settings. */

export const PLUGIN_ID = 'monarch-lab:panel';
export const PANEL_ID = 'monarch-lab-panel';
export const OPEN_COMMAND = 'monarch-lab:open';

/** The kernel owns the one comm and its fixed id; see monarch_lab/notebook/comm.py. */
export const COMM_TARGET = 'monarch_lab';
export const COMM_ID = 'monarch_lab.panel';
