/** Wires the panel into JupyterLab; what it does is in the files beside. */

import { ILayoutRestorer, JupyterFrontEnd, JupyterFrontEndPlugin } from '@jupyterlab/application';
import { ICommandPalette } from '@jupyterlab/apputils';
import { INotebookTracker } from '@jupyterlab/notebook';
import { IStatusBar } from '@jupyterlab/statusbar';
import { Connection } from './connection';
import { meshIcon } from './icon';
import { MeshModel } from './model';
import { MeshPanel } from './panel';
import { MeshStatus } from './status';
import { OPEN_COMMAND, PANEL_ID, PLUGIN_ID } from './tokens';

const plugin: JupyterFrontEndPlugin<void> = {
  id: PLUGIN_ID,
  description: 'Live meshes beside the notebook.',
  autoStart: true,
  requires: [INotebookTracker],
  optional: [ILayoutRestorer, ICommandPalette, IStatusBar],
  activate: (
    app: JupyterFrontEnd,
    tracker: INotebookTracker,
    restorer: ILayoutRestorer | null,
    palette: ICommandPalette | null,
    statusBar: IStatusBar | null
  ) => {
    const connection = new Connection(tracker);
    const model = new MeshModel(connection);
    const panel = new MeshPanel(model);
    panel.id = PANEL_ID;
    panel.title.icon = meshIcon;
    panel.title.caption = 'Mesh';
    panel.disposed.connect(() => {
      model.dispose();
      connection.dispose();
    });
    app.shell.add(panel, 'left', { rank: 900 });
    restorer?.add(panel, panel.id);
    app.commands.addCommand(OPEN_COMMAND, {
      label: 'Show mesh panel',
      caption: 'Meshes of the current notebook, and what their processes are at',
      icon: meshIcon,
      execute: () => app.shell.activateById(panel.id)
    });
    palette?.addItem({ command: OPEN_COMMAND, category: 'Mesh' });
    if (statusBar) {
      const status = new MeshStatus(model, () => void app.commands.execute(OPEN_COMMAND));
      const registration = statusBar.registerStatusItem(PLUGIN_ID, {
        item: status,
        align: 'left',
        rank: 10,
        isActive: () => status.isActive,
        activeStateChanged: model.changed
      });
      panel.disposed.connect(() => {
        registration.dispose();
        status.dispose();
      });
    }
  }
};

export default plugin;
