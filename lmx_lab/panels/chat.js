// The chat panel. The transcript comes from Python; the view has only the text in the input field.

// Python refuses longer texts, and the kernel's WebSocket does not transfer much longer ones.
const MAX_CHARACTERS = 1e6;
const MAX_FILE_CHARACTERS = 4e6 + 1;
const SAMPLING = [["temperature", 0.1], ["top_p", 0.05], ["max_tokens", 1], ["seed", 1]];

export default panel("Chat", ({ model, root, watch }) => {
  const get = (name) => model.get(name);
  const busy = () => get("live").id;

  const strip = h("p", { class: "error", role: "alert" });
  const say = (text) => set(strip, text);
  const act = (what, fields) => (say(""), ask(model, what, fields).then((result) => result ?? true, (error) => say(error.message)));

  const message = (item) => {
    const buttons = item.role === "user"
      ? [h("button", { class: "quiet", title: "change this question and send it again", onclick: () => edit(item) }, "edit")]
      : [];
    const [node, show] = messageView(item, buttons);
    return [node, (now) => {
      show(now);
      node.ariaCurrent = now.id === edited ? "true" : null;
    }];
  };
  const removed = h("p", { class: "dim" });
  const list = h("div");
  const hint = example("No messages yet. Ask below, or in a cell:", 'lab.chat("What is the capital of France?")');
  // The log can have the focus, so that arrow keys scroll it instead of selecting another cell.
  const log = h("div", { class: "scroll log", role: "log", "aria-label": "transcript", tabIndex: 0 }, hint, removed, list);
  const show = keyed(list, message);

  // The question that the next message replaces.
  let edited = null;
  const edit = (item) => {
    edited = item?.id ?? null;
    box.value = item?.text ?? "";
    box.focus();
    update();
  };
  const editing = h("p", { class: "row" }, h("span", { class: "grow" },
    "Sending replaces the marked question and removes what follows it."),
    h("button", { class: "quiet", onclick: () => edit(null) }, "Cancel editing"));

  const box = h("textarea", {
    rows: 2, "aria-label": "message", placeholder: "Enter sends, Shift+Enter inserts a new line",
    onkeydown: (event) => {
      if (event.key === "Escape") busy() ? stop() : edited != null && edit(null);
      // In Safari, the Enter key that ends a composition has the code 229.
      if (event.key !== "Enter" || event.shiftKey || event.isComposing || event.keyCode === 229) return;
      event.preventDefault();
      event.repeat || send();
    },
  });
  const inputs = SAMPLING.map(([name, step]) => [name, h("input", { type: "number", min: 0, step })]);
  const system = h("textarea", { rows: 2 });
  const send = async () => {
    const text = box.value;
    const fields = { text: text.slice(0, MAX_CHARACTERS), system: system.value.slice(0, MAX_CHARACTERS), replace: edited };
    for (const [name, { value }] of inputs) fields[name] = value === "" ? null : +value;
    if (text.trim() && (await act("send", fields)) && box.value === text) {
      box.value = "";
      edited = null;
      update();
    }
  };
  const stop = () => busy() && act("stop");
  const go = h("button", { class: "go", onclick: () => (busy() ? stop() : send()) });
  const status = h("span", { class: "dim", role: "status" });
  const save = async (format, ending, type) => {
    const text = await act("export", { format });
    if (!text) return;
    const href = URL.createObjectURL(new Blob([text], { type }));
    h("a", { href, download: `chat-${new Date().toISOString().slice(0, 10)}.${ending}` }).click();
    setTimeout(() => URL.revokeObjectURL(href), 60000);
  };
  const file = h("input", {
    type: "file", accept: ".json,application/json", hidden: true, onchange: async () => {
      const text = await file.files[0]?.text();
      file.value = "";
      if (text != null) await act("load", { text: text.slice(0, MAX_FILE_CHARACTERS) });
    },
  });
  const labelled = (name, input) => h("label", {}, name, input);

  root.classList.add("chat");
  const tools = h("span", { class: "row" },
    h("button", { title: "save the conversation as JSON", onclick: () => save("json", "json", "application/json") }, "Save"),
    h("button", { title: "save the conversation as Markdown", onclick: () => save("markdown", "md", "text/markdown") }, "Export"));
  root.append(log, strip, editing, box,
    h("div", { class: "row" }, go, status, h("span", { class: "grow" }), tools,
      h("button", { title: "open a saved conversation", onclick: () => file.click() }, "Open"), file,
      h("button", { onclick: () => (box.focus(), act("clear")) }, "Clear")),
    h("details", {}, h("summary", {}, "sampling and system prompt"),
      h("div", { class: "row" }, ...inputs.map(([name, input]) => labelled(name, input))), labelled("system prompt", system)));

  const update = () => {
    const messages = get("messages");
    if (!messages.some(({ id }) => id === edited)) edited = null;
    editing.hidden = edited == null;
    hint.hidden = messages.length;
    tools.hidden = !messages.length;
    const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 9;
    show([...messages, ...(busy() ? [get("live")] : [])]);
    list.ariaBusy = !!busy();
    set(removed, get("removed"));
    set(status, get("live").status ?? "");
    set(go, busy() ? "Stop" : "Send");
    if (atEnd) log.scrollTop = log.scrollHeight;
  };
  watch(["messages", "live", "removed"], update);
  watch(["sampling"], () => {
    for (const [name, input] of [...inputs, ["system", system]])
      if (!input.matches(":focus")) input.value = get("sampling")[name] ?? "";
  });
  let wasServing = true;
  watch(["server"], () => {
    const serves = isServing(get("server"));
    go.setAttribute("aria-disabled", !serves);
    // The reason of an earlier refusal no longer applies.
    if (serves && !wasServing) say("");
    wasServing = serves;
  });
});
