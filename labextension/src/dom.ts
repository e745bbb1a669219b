/** Making elements, and changing them only where they differ: an untouched button keeps a click that is under way. */

export function make<K extends keyof HTMLElementTagNameMap>(
  tag: K,
  className: string,
  ...children: (Node | string)[]
): HTMLElementTagNameMap[K] {
  const node = document.createElement(tag);
  node.className = className;
  node.append(...children);
  return node;
}

export function setText(node: HTMLElement, text: string): void {
  if (node.textContent !== text) {
    node.textContent = text;
  }
}

export function setShown(node: HTMLElement, isShown: boolean): void {
  node.hidden = !isShown;
}
