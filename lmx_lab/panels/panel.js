// What all panels have in common. No markup is ever made from text: h() makes elements, text stays text.

/**
 * An element: h("button", {class: "go", onclick: f}, "Load").
 * @param {string} tag
 * @param {Record<string, any>} [props] Properties; "class", "aria-…" and "data-…" as attributes.
 * @param {...(Node|string|null)} children
 */
const h = (tag, props = {}, ...children) => {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(props)) {
    if (key === "class" || key === "role" || key.includes("-")) node.setAttribute(key, value);
    else node[key] = value;
  }
  // In cells JupyterLab takes keys for its own: arrows move to the next cell, "dd" deletes this one, Shift+Enter runs it.
  if (/^(button|select|summary|textarea)$/.test(tag) || props.tabIndex === 0) node.dataset.lmSuppressShortcuts = "";
  // It also keeps Enter from making new lines, once for each key.
  if (tag === "textarea") node.addEventListener("beforeinput", (event) => event.stopImmediatePropagation());
  node.append(...children.filter((child) => child !== null));
  return node;
};

/**
 * Copies text, or what a function returns or promises; the button says so.
 * @param {string} [name] What stands on it; label is for those who hear it.
 */
const copyButton = (text, label, name = "copy") =>
  h("button", {
    class: "quiet", title: "copy " + label, "aria-label": "copy " + label,
    onclick: async ({ currentTarget: button }) => {
      const value = typeof text === "function" ? await text() : text;
      if (value == null) return;
      try {
        await navigator.clipboard.writeText(value);
      } catch {
        // Not on plain http to another host: the old way, with a selection.
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

const COMPARE_MS = 10000;
let asked = 0;
const session = Math.random().toString(36).slice(2);

/**
 * The way to Python and back. Silence for a second means that the kernel is busy where its messages wait behind the
 * cell (VS Code): then `fallback`, a route of the server, is asked directly (with direct.js), until somebody has
 * answered. Longer silence is an error.
 * @returns {Promise<any>} The result; rejects with an Error that has the message for people.
 */
const ask = (model, what, fields = {}, fallback = null) =>
  new Promise((resolve, reject) => {
    const id = session + asked++;
    const settled = new AbortController();
    const timers = [setTimeout(() => end(reject, Error("No answer: the kernel is busy or gone.")), 8000)];
    const end = (settle, value) => {
      timers.forEach(clearTimeout);
      settled.abort();
      model.off("msg:custom", heard);
      settle(value);
    };
    const heard = (message) => {
      if (message?.id !== id) return;
      message.ok ? end(resolve, message.result) : end(reject, Error(message.error.message));
    };
    model.on("msg:custom", heard);
    if (fallback)
      timers.push(setTimeout(
        () => direct(model, fallback, settled.signal).then((value) => end(resolve, value), () => 0), 1000));
    try {
      model.send({ id, do: what, ...fields });
    } catch (error) {
      // Cut off from the kernel.
      if (!fallback) end(reject, error);
    }
  });

/**
 * A panel's frame: a labelled region, kept up to date as long as it is shown.
 * @param {(root: HTMLElement, watch: (names: string[], f: () => void) => void) => void|(() => void)} build
 *   watch calls f now and whenever one of these traits has changed.
 */
const panel = (label, build) => ({
  render({ model, el }) {
    const root = h("section", { class: "lmx", "aria-label": label });
    const note = h("p", { class: "note", role: "status" });
    const listeners = [];
    const watch = (names, f) => {
      const name = names.map((each) => "change:" + each).join(" ");
      model.on(name, f);
      listeners.push([name, f]);
      f();
    };
    // The kernel was restarted: nobody is left to say so.
    const gone = () =>
      model.set("server", { ...model.get("server"), state: "gone", note: "The kernel is gone; run its cells." });
    model.on("comm_live_update", gone);
    listeners.push(["comm_live_update", gone]);
    // Messages of state that a breaking connection has swallowed.
    let seen = model.get("revision") - 1;
    watch(["revision"], () => {
      const now = model.get("revision");
      seen = now === seen + 1 ? now : -1;
    });
    const comparing = setInterval(() => {
      if (!document.hidden) ask(model, "compare", { revision: seen }).then((now) => (seen = now), () => 0);
    }, COMPARE_MS);
    el.append(root);
    const left = build({ model, root, watch });
    root.append(note);
    watch(["server"], () => {
      const text = model.get("server").note;
      note.textContent = text;
      note.hidden = !text;
    });
    return () => {
      clearInterval(comparing);
      for (const [name, f] of listeners) model.off(name, f);
      left?.();
    };
  },
});
