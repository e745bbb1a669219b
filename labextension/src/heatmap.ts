/** A large mesh: one canvas cell for each process, with the counts below; the pointer tells more of one. */

import { make, setText } from './dom';
import { formatActivity, formatDetails } from './format';
import { PROCESS_STATES, ProcessSnapshot } from './protocol';

const LARGEST_CELL_PX = 18;
const SMALLEST_CELL_PX = 4;

export class HeatMap {
  constructor() {
    this._canvas.setAttribute('role', 'img');
    this._canvas.addEventListener('pointermove', event => this._point(event.offsetX, event.offsetY));
    this._canvas.addEventListener('pointerleave', () => this._point(-1, -1));
  }

  update(processes: ProcessSnapshot[]): void {
    this._processes = processes;
    this.draw();
    const counts = PROCESS_STATES.map(state => {
      const count = processes.filter(process => process.state === state).length;
      const part = make('span', 'mlab-HeatMap-count', make('span', 'mlab-dot'), `${count} ${state}`);
      part.dataset.state = state;
      return count > 0 ? part : null;
    }).filter(part => part !== null);
    this._counts.replaceChildren(...counts);
    this._canvas.setAttribute('aria-label', this._counts.textContent);
    this._tell();
  }

  /** Also to be called when the width or the theme has changed. */
  draw(): void {
    const width = this.node.clientWidth;
    const context = this._canvas.getContext('2d');
    if (width === 0 || context === null) {
      return; // not shown: there is nothing to measure
    }
    const count = this._processes.length;
    this._cell = Math.max(
      SMALLEST_CELL_PX,
      Math.min(LARGEST_CELL_PX, Math.floor(width / Math.ceil(Math.sqrt(count))))
    );
    this._columns = Math.max(1, Math.floor(width / this._cell));
    const height = Math.ceil(count / this._columns) * this._cell;
    const ratio = window.devicePixelRatio || 1;
    this._canvas.width = width * ratio;
    this._canvas.height = height * ratio;
    this._canvas.style.height = `${height}px`;
    context.scale(ratio, ratio);
    const style = getComputedStyle(this.node);
    const colours = new Map(PROCESS_STATES.map(state => [state, style.getPropertyValue(`--mlab-${state}`).trim()]));
    const gap = this._cell > 6 ? 2 : 1;
    this._processes.forEach((process, i) => {
      context.fillStyle = colours.get(process.state) ?? 'gray';
      const [x, y] = [(i % this._columns) * this._cell, Math.floor(i / this._columns) * this._cell];
      context.fillRect(x, y, this._cell - gap, this._cell - gap);
    });
  }

  private _point(x: number, y: number): void {
    const column = Math.floor(x / this._cell);
    this._pointed = x < 0 || column >= this._columns ? -1 : Math.floor(y / this._cell) * this._columns + column;
    this._tell();
  }

  private _tell(): void {
    const process = this._pointed < 0 ? undefined : this._processes.at(this._pointed);
    setText(
      this._told,
      process
        ? [process.label, process.state, formatActivity(process), formatDetails(process)].filter(Boolean).join(' · ')
        : ''
    );
  }

  private _processes: ProcessSnapshot[] = [];
  private _pointed = -1;
  private _columns = 1;
  private _cell = LARGEST_CELL_PX;
  private readonly _canvas = make('canvas', 'mlab-HeatMap-canvas');
  private readonly _counts = make('div', 'mlab-HeatMap-counts');
  private readonly _told = make('div', 'mlab-HeatMap-told');
  readonly node = make('div', 'mlab-HeatMap', this._canvas, this._counts, this._told);
}
