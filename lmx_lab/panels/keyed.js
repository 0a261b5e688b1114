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
