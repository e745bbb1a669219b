/** One mesh of the panel: its head, its buttons, and its processes as rows or as a heat map. */

import { make, setShown, setText } from './dom';
import { formatAge, plural } from './format';
import { HeatMap } from './heatmap';
import { MeshSnapshot } from './protocol';
import { ProcessRows } from './rows';

const MOST_ROWS = 16;

export interface MeshButtons {
  interrupt(mesh: MeshSnapshot): void;
  stop(mesh: MeshSnapshot): void;
}

export class MeshSection {
  constructor(mesh: MeshSnapshot, buttons: MeshButtons) {
    this._mesh = mesh;
    this._interrupt.addEventListener('click', () => buttons.interrupt(this._mesh));
    this._stop.addEventListener('click', () => buttons.stop(this._mesh));
    this._interrupt.title = 'Interrupt what its processes are running';
    this._stop.title = 'End its processes';
  }

  update(mesh: MeshSnapshot, isCurrent: boolean): void {
    this._mesh = mesh;
    this.node.dataset.mesh = mesh.name;
    this.node.dataset.state = mesh.state;
    setText(this._name, mesh.name);
    setText(this._state, mesh.state);
    setShown(this._current, isCurrent);
    const dims = mesh.dims.map(([name, size]) => `${name} ${size}`).join(' × ');
    const facts = [dims, mesh.device, `up ${formatAge(mesh.age_s)}`, plural(mesh.ops, 'op')];
    setText(this._facts, facts.filter(Boolean).join(' · '));
    setText(this._note, mesh.note);
    setShown(this._note, mesh.note !== '');
    this._interrupt.disabled = mesh.state !== 'live';
    this._stop.disabled = mesh.state === 'closed';
    const isSmall = mesh.processes.length <= MOST_ROWS;
    setShown(this._rows.node, isSmall);
    setShown(this._map.node, !isSmall);
    if (isSmall) {
      this._rows.update(mesh.processes);
    } else {
      this._map.update(mesh.processes);
    }
  }

  resize(): void {
    this._map.draw();
  }

  private _mesh: MeshSnapshot;
  private readonly _name = make('span', 'mlab-Mesh-name');
  private readonly _current = make('span', 'mlab-Mesh-current', 'current');
  private readonly _state = make('span', 'mlab-Mesh-state');
  private readonly _facts = make('div', 'mlab-Mesh-facts');
  private readonly _note = make('div', 'mlab-Mesh-note');
  private readonly _interrupt = make('button', 'mlab-button mlab-interrupt', 'Interrupt');
  private readonly _stop = make('button', 'mlab-button mlab-stop', 'Stop');
  private readonly _rows = new ProcessRows();
  private readonly _map = new HeatMap();
  readonly node = make(
    'section',
    'mlab-Mesh',
    make('header', 'mlab-Mesh-head', this._name, this._current, this._state),
    this._facts,
    this._note,
    make('div', 'mlab-Mesh-buttons', this._interrupt, this._stop),
    this._rows.node,
    this._map.node
  );
}
