/** Text of an element, touched only when it changes: a selection in it stays, and a screen reader is not woken. */
const set = (node, text) => {
  if (node.textContent !== text) node.textContent = text;
};

/**
 * Children that follow a list of items with an id: made once for each, then updated where they are, so that neither
 * focus nor selection is lost.
 * @param {(item: any) => [Element, (item: any) => void]} make
 * @returns {(items: any[]) => void}
 */
const keyed = (parent, make) => {
  const kept = new Map();
  return (items) => {
    const ids = new Set(items.map((item) => item.id));
    for (const [id, [node]] of kept)
      if (!ids.has(id)) {
        node.remove();
        kept.delete(id);
      }
    items.forEach((item, at) => {
      if (!kept.has(item.id)) kept.set(item.id, make(item));
      const [node, update] = kept.get(item.id);
      update(item);
      if (parent.children[at] !== node) parent.insertBefore(node, parent.children[at] ?? null);
    });
  };
};
