/** The side panel: renders the model, sends its commands, keeps no truth. */

import { Dialog, showDialog } from '@jupyterlab/apputils';
import { Widget } from '@lumino/widgets';
import { ConnectionState } from './connection';
import { make, setShown, setText } from './dom';
import { plural } from './format';
import { MeshButtons, MeshSection } from './mesh';
import { MeshModel } from './model';
import { MeshSnapshot } from './protocol';

const STATUS: Record<ConnectionState, string> = {
  'no kernel': 'no kernel',
  'not loaded': 'not loaded in this kernel',
  connected: 'connected',
  restarting: 'kernel restarting',
  dead: 'kernel dead'
};

export class MeshPanel extends Widget implements MeshButtons {
  constructor(private readonly _model: MeshModel) {
    super();
    this.addClass('mlab-Panel');
    this.node.append(
      make('div', 'mlab-head', this._notebook, this._status),
      this._notice,
      this._hint,
      this._list
    );
    _model.changed.connect(this._render, this);
    this._render();
  }

  interrupt(mesh: MeshSnapshot): void {
    this._model.interrupt(mesh.name);
  }

  stop(mesh: MeshSnapshot): void {
    void showDialog({
      title: `Stop ${mesh.name}?`,
      body: `Its ${plural(mesh.processes.length, 'process', 'processes')} will end, and every value on them is lost.`,
      buttons: [Dialog.cancelButton(), Dialog.warnButton({ label: 'Stop' })],
      defaultButton: 0
    }).then(result => {
      if (result.button.accept && !this.isDisposed) {
        this._model.stop(mesh.name);
      }
    });
  }

  dispose(): void {
    if (this.isDisposed) {
      return;
    }
    this._model.changed.disconnect(this._render, this);
    super.dispose();
  }

  protected onResize(): void {
    this._resize();
  }

  protected onAfterShow(): void {
    this._resize();
  }

  private _resize(): void {
    for (const section of this._sections.values()) {
      section.resize();
    }
  }

  private _render(): void {
    const { connection, notebook, notice, snapshot } = this._model;
    setText(this._notebook, notebook || 'Mesh');
    setText(this._status, STATUS[connection]);
    this._status.dataset.state = connection;
    setText(this._notice, notice);
    setShown(this._notice, notice !== '');
    const meshes = snapshot?.meshes ?? [];
    this._renderHint(connection, snapshot !== null && meshes.length === 0);
    const names = new Set(meshes.map(mesh => mesh.name));
    for (const [name, section] of this._sections) {
      if (!names.has(name)) {
        section.node.remove();
        this._sections.delete(name);
      }
    }
    for (const mesh of meshes) {
      let section = this._sections.get(mesh.name);
      if (!section) {
        section = new MeshSection(mesh, this);
        this._sections.set(mesh.name, section);
        this._list.append(section.node);
      }
      section.update(mesh, mesh.name === snapshot?.current);
    }
  }

  private _renderHint(connection: ConnectionState, isEmpty: boolean): void {
    let lines: [string, string] | null = null;
    if (connection === 'no kernel') {
      lines = ['Open a notebook to see its mesh here.', ''];
    } else if (connection === 'not loaded') {
      lines = ['To see meshes here, run in a cell', '%load_ext monarch_lab'];
    } else if (connection === 'connected' && isEmpty) {
      lines = ['No mesh yet. To start one, run in a cell', '%mesh start'];
    }
    setShown(this._hint, lines !== null);
    setText(this._hintText, lines?.[0] ?? '');
    setText(this._hintCode, lines?.[1] ?? '');
    setShown(this._hintCode, Boolean(lines?.[1]));
  }

  private readonly _notebook = make('span', 'mlab-notebook');
  private readonly _status = make('span', 'mlab-status');
  private readonly _notice = make('div', 'mlab-notice');
  private readonly _hintText = make('div', 'mlab-hint-text');
  private readonly _hintCode = make('code', 'mlab-hint-code');
  private readonly _hint = make('div', 'mlab-hint', this._hintText, this._hintCode);
  private readonly _list = make('div', 'mlab-list');
  private readonly _sections = new Map<string, MeshSection>();
}
