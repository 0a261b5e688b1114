// Functions of the panels and the chat page that create elements. Text is never interpreted as markup.

/**
 * Create an element: h("button", {class: "go", onclick: f}, "Load").
 * @param {string} tag
 * @param {Record<string, any>} [props] Properties of the element. "class", "aria-…" and "data-…" are attributes.
 * @param {...(Node|string|null)} children
 */
const h = (tag, props = {}, ...children) => {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(props)) {
    if (key === "class" || key === "role" || key.includes("-")) node.setAttribute(key, value);
    else node[key] = value;
  }
  // In cells, JupyterLab handles keys itself: arrows select another cell, "dd" deletes the cell, Shift+Enter runs it.
  if (/^(button|select|summary|textarea)$/.test(tag) || props.tabIndex === 0) node.dataset.lmSuppressShortcuts = "";
  // JupyterLab also cancels the insertion of new lines.
  if (tag === "textarea") node.addEventListener("beforeinput", (event) => event.stopImmediatePropagation());
  node.append(...children.filter((child) => child !== null));
  return node;
};

/**
 * Create a button that copies a text, and then displays "copied".
 * @param {string|((button: HTMLElement) => any)} text The text, or a function that is called with the button and returns the text or
 *   a promise of it. For null, nothing is copied.
 * @param {string} label Describes the text, for screen readers.
 * @param {string} [name] The visible label.
 */
const copyButton = (text, label, name = "copy") =>
  h("button", {
    class: "quiet", title: "copy " + label, "aria-label": "copy " + label,
    onclick: async ({ currentTarget: button }) => {
      const value = typeof text === "function" ? await text(button) : text;
      if (value == null) return;
      try {
        await navigator.clipboard.writeText(value);
      } catch {
        // The clipboard API is not available on plain HTTP from another host; copy a selection instead.
        const area = h("textarea", { value });
        document.body.append(area);
        area.select();
        document.execCommand("copy");
        area.remove();
      }
      button.textContent = "copied";
      setTimeout(() => (button.textContent = name), 1500);
    },
  }, name);

/** Set the text of an element if it has changed, so that a selection stays and a screen reader is not notified. */
const set = (node, text) => {
  if (node.textContent !== text) node.textContent = text;
};

/**
 * Return a function that shows a list of items as children of an element. Children are created once for each id and
 * then updated, so that focus and selection stay.
 * @param {(item: any) => [Element, (item: any) => void]} make Creates a child and its update function.
 * @returns {(items: any[]) => void}
 */
const keyed = (parent, make) => {
  const children = new Map();
  return (items) => {
    const ids = new Set(items.map((item) => item.id));
    for (const [id, [node]] of children)
      if (!ids.has(id)) {
        node.remove();
        children.delete(id);
      }
    items.forEach((item, at) => {
      if (!children.has(item.id)) children.set(item.id, make(item));
      const [node, update] = children.get(item.id);
      update(item);
      if (parent.children[at] !== node) parent.insertBefore(node, parent.children[at] ?? null);
    });
  };
};
