/** The status bar's line: which mesh cells run on, and how many of its processes are there. Opens the panel. */

import { Widget } from '@lumino/widgets';
import { make, setText } from './dom';
import { meshIcon } from './icon';
import { plural } from './format';
import { MeshModel } from './model';

export class MeshStatus extends Widget {
  constructor(
    private readonly _model: MeshModel,
    open: () => void
  ) {
    super();
    this.addClass('mlab-Status');
    this._button.addEventListener('click', open);
    this._button.title = 'Show mesh panel';
    meshIcon.element({ container: this._icon, width: '14px', height: '14px' });
    this.node.append(this._button);
    _model.changed.connect(this._render, this);
    this._render();
  }

  /** Whether there is a mesh to speak of. */
  get isActive(): boolean {
    return this._text.textContent !== '';
  }

  dispose(): void {
    if (this.isDisposed) {
      return;
    }
    this._model.changed.disconnect(this._render, this);
    super.dispose();
  }

  private _render(): void {
    const snapshot = this._model.snapshot;
    const mesh = snapshot?.meshes.find(mesh => mesh.name === snapshot.current);
    if (!mesh) {
      setText(this._text, '');
      return;
    }
    const all = mesh.processes.length;
    const gone = mesh.processes.filter(process => process.state === 'lost' || process.state === 'exited').length;
    const count = plural(all, 'process', 'processes');
    setText(this._text, `${mesh.name}: ${gone > 0 ? `${all - gone} of ${count}` : count}`);
    this.node.dataset.state = gone > 0 ? 'lost' : mesh.state;
  }

  private readonly _icon = make('span', 'mlab-Status-icon');
  private readonly _text = make('span', 'mlab-Status-text');
  private readonly _button = make('button', 'mlab-Status-button', this._icon, this._text);
}
