// Functions of all panels that create a panel and communicate with Python.

const COMPARE_MS = 10000;
const DISCONNECTED = "The kernel was restarted or stopped; run the cells again.";
let requests = 0;
const session = Math.random().toString(36).slice(2);

/**
 * Send a request to the panel's Python object, and return its result. In VS Code, messages wait while the kernel is
 * busy: without a reply for one second, `fallback`, a route of the server, is called directly (see models.js); the
 * first reply counts. Without any reply for 8 seconds, the request fails.
 * @returns {Promise<any>} The result. Rejects with an Error whose message can be displayed, and whose `param` names the wrong field.
 */
const ask = (model, what, fields = {}, fallback = null) =>
  new Promise((resolve, reject) => {
    const id = session + requests++;
    const settled = new AbortController();
    const timers = [setTimeout(() => end(reject, Error("No reply: the kernel is busy or was stopped.")), 8000)];
    const end = (settle, value) => {
      timers.forEach(clearTimeout);
      settled.abort();
      model.off("msg:custom", receive);
      settle(value);
    };
    const receive = (message) => {
      if (message?.id !== id) return;
      message.ok ? end(resolve, message.result) : end(reject, Object.assign(Error(message.error.message), message.error));
    };
    model.on("msg:custom", receive);
    if (fallback)
      timers.push(setTimeout(
        () => direct(model, fallback, fields, settled.signal).then((value) => end(resolve, value), () => 0), 1000));
    try {
      model.send({ id, do: what, ...fields });
    } catch (error) {
      // There is no connection to the kernel.
      if (!fallback) end(reject, error);
    }
  });

/** Format a time of day as the server does, whatever the language of the browser. */
const clock = (ms, options) => new Date(ms).toLocaleTimeString("en-GB", options);

/** Return an example for an empty panel: a sentence, and code to run in a cell. */
const example = (text, code) => h("p", { class: "dim" }, text + " ", h("code", {}, code));

/** Display the note of each lab only once in a notebook: in the first visible panel. */
const shareNotes = (place) => {
  const labs = new Set();
  for (const note of (place.closest(".jp-Notebook") ?? document).querySelectorAll(".lmx > .shared")) {
    const { lab } = note.dataset;
    const isShown = note.textContent && note.parentElement.clientWidth > 0;
    note.hidden = !isShown || labs.has(lab);
    if (isShown) labs.add(lab);
  }
};

const isServing = ({ state }) => /ing$/.test(state);

/**
 * Create the module of a panel: a labelled region with a title, and a note below it, updated as long as it is displayed.
 * @param {(parts: {model: any, root: HTMLElement, head: HTMLElement, watch: (names: string[], f: () => void) => void})
 *   => void|(() => void)} build
 *   Fills the region, and may add to the line of the title, `head`. May return a function that is called at the end.
 *   watch calls f immediately and whenever one of the named traits has changed.
 * @param {(get: (name: string) => any) => string} named The model beside the title; by default the loaded one.
 */
const panel = (label, build, named = (get) =>
  isServing(get("server")) ? get("server").model ?? "no model is loaded" : "") => ({
  render({ model, el }) {
    const get = (name) => model.get(name);
    const pill = h("span");
    const name = h("b", { class: "name" });
    const head = h("div", { class: "row head" }, h("h3", {}, label), pill, name);
    const note = h("p", { class: "note shared", role: "status" });
    const root = h("section", { class: "lmx", "aria-label": label }, head, note);
    const listeners = [];
    const watch = (names, f) => {
      const name = names.map((each) => "change:" + each).join(" ");
      model.on(name, f);
      listeners.push([name, f]);
      f();
    };
    // After a restart of the kernel no Python object updates this panel.
    const disconnect = () => model.set("server", { ...get("server"), state: "disconnected", note: DISCONNECTED });
    model.on("comm_live_update", disconnect);
    listeners.push(["comm_live_update", disconnect]);
    // Detect updates that were lost with a connection: revisions are consecutive, and Python sends everything again.
    let seen = get("revision") - 1;
    watch(["revision"], () => {
      const now = get("revision");
      seen = now === seen + 1 ? now : -1;
    });
    const comparing = setInterval(() => {
      if (!document.hidden) ask(model, "compare", { revision: seen }).then((now) => (seen = now), () => 0);
    }, COMPARE_MS);
    el.append(root);
    const close = build({ model, root, head, watch });
    watch(["server"], () => {
      const { state, url, note: text = "" } = get("server");
      note.dataset.lab = state === "disconnected" ? state : url;
      note.textContent = text;
      pill.textContent = state ?? "";
      pill.className = "pill state " + ({ running: "good", lagging: "warn" }[state] ?? "bad");
      shareNotes(root);
    });
    watch(["wide"], () => root.classList.toggle("wide", get("wide")));
    watch(["server", "table"], () => (name.textContent = named(get)));
    // Also called when the panel becomes visible or hidden.
    const sizes = new ResizeObserver(() => shareNotes(root));
    sizes.observe(root);
    return () => {
      clearInterval(comparing);
      sizes.disconnect();
      note.className = "";
      shareNotes(root);
      for (const [name, f] of listeners) model.off(name, f);
      close?.();
    };
  },
});
