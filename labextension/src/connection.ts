/** Follows the current notebook's kernel and its monarch_lab comm. Holds no snapshot. */

import { ISessionContext } from '@jupyterlab/apputils';
import { INotebookTracker, NotebookPanel } from '@jupyterlab/notebook';
import { Kernel, KernelMessage } from '@jupyterlab/services';
import { IDisposable } from '@lumino/disposable';
import { ISignal, Signal } from '@lumino/signaling';
import { FromKernel, ToKernel } from './protocol';
import { COMM_ID, COMM_TARGET } from './tokens';

export type ConnectionState = 'no kernel' | 'not loaded' | 'connected' | 'restarting' | 'dead';

/** The comm of each kernel connection: JupyterLab refuses to make a second one of the same id. */
const COMMS = new WeakMap<Kernel.IKernelConnection, Kernel.IComm>();

export class Connection implements IDisposable {
  constructor(private readonly _tracker: INotebookTracker) {
    _tracker.currentChanged.connect(this._follow, this);
    this._follow(_tracker, _tracker.currentWidget);
  }

  get state(): ConnectionState {
    return this._state;
  }

  /** Name of the notebook that is followed, '' where there is none. */
  get title(): string {
    return this._panel?.title.label ?? '';
  }

  get stateChanged(): ISignal<this, ConnectionState> {
    return this._stateChanged;
  }

  get received(): ISignal<this, FromKernel> {
    return this._received;
  }

  get isDisposed(): boolean {
    return this._isDisposed;
  }

  /** Is dropped without a connection: what the button acted on is gone with it. */
  send(message: ToKernel): void {
    this._comm?.send(message);
  }

  dispose(): void {
    if (this._isDisposed) {
      return;
    }
    this._isDisposed = true;
    this._leave();
    this._tracker.currentChanged.disconnect(this._follow, this);
    Signal.clearData(this);
  }

  private get _kernel(): Kernel.IKernelConnection | null {
    return this._context?.session?.kernel ?? null;
  }

  private _follow(_: INotebookTracker, panel: NotebookPanel | null): void {
    this._leave();
    this._panel = panel;
    this._context = panel?.sessionContext ?? null;
    this._context?.kernelChanged.connect(this._attach, this);
    this._context?.statusChanged.connect(this._onStatus, this);
    this._context?.iopubMessage.connect(this._onIOPub, this);
    panel?.title.changed.connect(this._onTitle, this);
    this._attach();
  }

  private _leave(): void {
    this._context?.kernelChanged.disconnect(this._attach, this);
    this._context?.statusChanged.disconnect(this._onStatus, this);
    this._context?.iopubMessage.disconnect(this._onIOPub, this);
    this._panel?.title.changed.disconnect(this._onTitle, this);
    this._panel = this._context = this._comm = null;
  }

  private _attach(): void {
    this._comm = null;
    const kernel = this._kernel;
    this._setState(kernel ? 'not loaded' : 'no kernel');
    if (!kernel) {
      return;
    }
    // The main shell answers this, so only once it is free; a busy kernel is found by _onIOPub.
    kernel.requestCommInfo({ target_name: COMM_TARGET }).then(
      reply => {
        const isLoaded = reply.content.status === 'ok' && COMM_ID in reply.content.comms;
        if (isLoaded && !this._comm && kernel === this._kernel) {
          this._adopt(kernel);
        }
      },
      () => undefined // the kernel went away, which _onStatus or kernelChanged tells
    );
  }

  private _onStatus(_: ISessionContext, status: Kernel.Status): void {
    if (status === 'restarting' || status === 'autorestarting' || status === 'dead') {
      const kernel = this._kernel;
      if (kernel) {
        COMMS.get(kernel)?.dispose();
        COMMS.delete(kernel);
      }
      this._comm = null;
      this._setState(status === 'dead' ? 'dead' : 'restarting');
    } else if (status === 'idle' && (this._state === 'restarting' || this._state === 'dead')) {
      this._attach();
    }
  }

  private _onTitle(): void {
    this._stateChanged.emit(this._state);
  }

  /** A message of our comm proves that the kernel has monarch_lab loaded, busy or not. */
  private _onIOPub(_: ISessionContext, message: KernelMessage.IMessage): void {
    const kernel = this._kernel;
    if (kernel && !this._comm && KernelMessage.isCommMsgMsg(message) && message.content.comm_id === COMM_ID) {
      this._adopt(kernel);
      this._onMessage(kernel, message);
    }
  }

  /** Bind to the kernel's comm. No comm_open is sent either way. */
  private _adopt(kernel: Kernel.IKernelConnection): void {
    let comm = COMMS.get(kernel);
    if (!comm || comm.isDisposed) {
      comm = kernel.createComm(COMM_TARGET, COMM_ID);
      COMMS.set(kernel, comm);
    }
    comm.onMsg = message => this._onMessage(kernel, message);
    comm.onClose = () => {
      if (kernel === this._kernel) {
        this._comm = null;
        this._setState('not loaded');
      }
    };
    this._comm = comm;
    this._setState('connected');
    this.send({ op: 'sync' });
  }

  private _onMessage(kernel: Kernel.IKernelConnection, message: KernelMessage.ICommMsgMsg): void {
    // The comms of other notebooks' kernels stay open, and go on talking.
    if (kernel === this._kernel && !this._isDisposed) {
      this._received.emit(message.content.data as unknown as FromKernel);
    }
  }

  private _setState(state: ConnectionState): void {
    this._state = state;
    this._stateChanged.emit(state);
  }

  private _state: ConnectionState = 'no kernel';
  private _panel: NotebookPanel | null = null;
  private _context: ISessionContext | null = null;
  private _comm: Kernel.IComm | null = null;
  private _isDisposed = false;
  private readonly _stateChanged = new Signal<this, ConnectionState>(this);
  private readonly _received = new Signal<this, FromKernel>(this);
}
