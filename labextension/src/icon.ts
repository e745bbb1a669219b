import { LabIcon } from '@jupyterlab/ui-components';

/** Four processes and what joins them; jp-icon3 follows the theme. */
export const meshIcon = new LabIcon({
  name: 'monarch-lab:mesh',
  svgstr: `<svg xmlns="http://www.w3.org/2000/svg" width="16" viewBox="0 0 22 22">
  <g class="jp-icon3" fill="#616161">
    <path d="M5 5h12v12H5z M6.8 6.8v8.4h8.4V6.8z" fill-rule="evenodd"/>
    <circle cx="6" cy="6" r="3"/><circle cx="16" cy="6" r="3"/><circle cx="6" cy="16" r="3"/><circle cx="16" cy="16" r="3"/>
  </g>
</svg>`
});
