// The conversations of the chat page, in the browser's IndexedDB. "heads" has the fields that the list needs, "bodies" the
// others.

const DATABASE = PREFIX;
const changes = "BroadcastChannel" in window ? new BroadcastChannel(PREFIX) : null;

const newId = () => [...crypto.getRandomValues(new Uint8Array(9))].map((byte) => byte.toString(36).padStart(2, "0")).join("");

const settled = (operation) =>
  new Promise((resolve, reject) => {
    operation.onsuccess = () => resolve(operation.result);
    operation.onerror = () => reject(operation.error);
  });

let opened = null;
const database = () => (opened ??= new Promise((resolve, reject) => {
  const operation = indexedDB.open(DATABASE, 1);
  operation.onupgradeneeded = () => {
    for (const name of ["heads", "bodies"]) operation.result.createObjectStore(name, { keyPath: "id" });
  };
  operation.onsuccess = () => resolve(operation.result);
  operation.onerror = () => reject(operation.error);
}));

/** Run `work` with both object stores in one transaction, and return its result when the transaction is complete. */
const transaction = async (mode, work) => {
  const running = (await database()).transaction(["heads", "bodies"], mode);
  const complete = new Promise((resolve, reject) => {
    running.oncomplete = resolve;
    running.onabort = () => reject(running.error ?? Error("the transaction was aborted"));
  });
  complete.catch(() => 0);
  const result = await work(running.objectStore("heads"), running.objectStore("bodies"));
  await complete;
  return result;
};

const store = {
  /** Return `{id, title, updated, revision}` of all conversations, the latest first. */
  list: () => transaction("readonly", async (heads) => (await settled(heads.getAll())).sort((a, b) => b.updated - a.updated)),

  load: (id) => transaction("readonly", async (heads, bodies) => {
    const [head, body] = await Promise.all([settled(heads.get(id)), settled(bodies.get(id))]);
    return head && body ? { ...body, ...head } : null;
  }),

  /**
   * Store a conversation. If another tab has changed it since it was loaded, a copy with another id is stored, so that
   * both versions are kept.
   * @returns {Promise<boolean>} Whether a copy was stored.
   */
  async save(chat) {
    const isCopy = await transaction("readwrite", async (heads, bodies) => {
      const stored = await settled(heads.get(chat.id));
      const isChanged = !!stored && stored.revision !== chat.revision;
      if (isChanged) Object.assign(chat, { id: newId(), title: chat.title + " (copy)" });
      const { id, title, updated, system, sampling, model, messages } = chat;
      const revision = newId();
      await Promise.all([settled(heads.put({ id, title, updated, revision })), settled(bodies.put({ id, system, sampling, model, messages }))]);
      chat.revision = revision;
      return isChanged;
    });
    changes?.postMessage(chat.id);
    return isCopy;
  },

  async remove(id) {
    await transaction("readwrite", (heads, bodies) => Promise.all([settled(heads.delete(id)), settled(bodies.delete(id))]));
    changes?.postMessage(id);
  },
};
