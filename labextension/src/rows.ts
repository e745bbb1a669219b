/** A small mesh: one row for each process. */

import { make, setText } from './dom';
import { formatActivity, formatDetails } from './format';
import { ProcessSnapshot } from './protocol';

class Row {
  constructor() {
    this.node.append(
      make('div', 'mlab-Row-line', this._dot, this._label, this._state, this._activity),
      this._details
    );
  }

  update(process: ProcessSnapshot): void {
    this.node.dataset.rank = String(process.rank);
    this.node.dataset.state = process.state;
    this.node.classList.toggle('mlab-mod-failed', process.state === 'lost' || process.exit !== '');
    this.node.title = `rank ${process.rank} on ${process.host}`;
    setText(this._label, process.label);
    setText(this._state, process.state);
    setText(this._activity, formatActivity(process));
    this._activity.title = this._activity.textContent;
    setText(this._details, formatDetails(process));
  }

  readonly node = make('li', 'mlab-Row');
  private readonly _dot = make('span', 'mlab-dot');
  private readonly _label = make('span', 'mlab-Row-label');
  private readonly _state = make('span', 'mlab-Row-state');
  private readonly _activity = make('span', 'mlab-Row-activity');
  private readonly _details = make('div', 'mlab-Row-details');
}

export class ProcessRows {
  update(processes: ProcessSnapshot[]): void {
    for (const extra of this._rows.splice(processes.length)) {
      extra.node.remove();
    }
    processes.forEach((process, i) => {
      let row = this._rows.at(i);
      if (!row) {
        row = new Row();
        this._rows.push(row);
        this.node.append(row.node);
      }
      row.update(process);
    });
  }

  readonly node = make('ul', 'mlab-Rows');
  private readonly _rows: Row[] = [];
}
