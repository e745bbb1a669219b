/** The last picture the kernel sent, and what the buttons ask for. Computes nothing of its own. */

import { IDisposable } from '@lumino/disposable';
import { ISignal, Signal } from '@lumino/signaling';
import { Connection, ConnectionState } from './connection';
import { FromKernel, KernelSnapshot } from './protocol';

export class MeshModel implements IDisposable {
  constructor(private readonly _connection: Connection) {
    _connection.stateChanged.connect(this._onState, this);
    _connection.received.connect(this._onReceived, this);
  }

  get changed(): ISignal<this, void> {
    return this._changed;
  }

  get connection(): ConnectionState {
    return this._connection.state;
  }

  get notebook(): string {
    return this._connection.title;
  }

  /** null until the kernel has sent one, and again when it is gone. */
  get snapshot(): KernelSnapshot | null {
    return this._snapshot;
  }

  /** Why the last command failed, '' if it did not. */
  get notice(): string {
    return this._notice;
  }

  get isDisposed(): boolean {
    return this._isDisposed;
  }

  interrupt(mesh: string): void {
    this._setNotice('');
    this._connection.send({ op: 'interrupt', mesh });
  }

  stop(mesh: string): void {
    this._setNotice('');
    this._connection.send({ op: 'stop', mesh });
  }

  dispose(): void {
    if (this._isDisposed) {
      return;
    }
    this._isDisposed = true;
    this._connection.stateChanged.disconnect(this._onState, this);
    this._connection.received.disconnect(this._onReceived, this);
    Signal.clearData(this);
  }

  private _onState(_: Connection, state: ConnectionState): void {
    if (state !== 'connected') {
      this._snapshot = null;
      this._notice = '';
    }
    this._changed.emit();
  }

  private _onReceived(_: Connection, message: FromKernel): void {
    switch (message.op) {
      case 'snapshot':
        this._snapshot = message.snapshot;
        this._changed.emit();
        break;
      case 'failed':
        this._setNotice(`${message.command} ${message.mesh}: ${message.text}`);
        break;
      case 'pong':
      case 'debug_text': // of a session that is held, and this view holds none
        break;
    }
  }

  private _setNotice(text: string): void {
    this._notice = text;
    this._changed.emit();
  }

  private _snapshot: KernelSnapshot | null = null;
  private _notice = '';
  private _isDisposed = false;
  private readonly _changed = new Signal<this, void>(this);
}
