// The chat panel. The transcript is Python's; only what is being written in the box is the view's own.

// Python refuses what is longer; more than that does not get through the kernel's socket.
const MOST = 1e6;
const KNOBS = [["temperature", 0.1], ["top_p", 0.05], ["max_tokens", 1], ["seed", 1]];

export default panel("Chat", ({ model, root, watch }) => {
  const get = (name) => model.get(name);
  const busy = () => get("live").id;

  const strip = h("p", { class: "error", role: "alert" });
  const say = (text) => set(strip, text);
  const act = (what, fields) => (say(""), ask(model, what, fields).then(() => true, (error) => say(error.message)));

  const turn = (item) => {
    const mine = item.role === "user";
    const text = h("div", { class: "text" }, "");
    const thoughts = h("div", { class: "text dim" }, "");
    const fold = h("details", {}, h("summary", {}, "thoughts"), thoughts);
    const stats = h("span", { class: "dim" });
    const error = h("div", { class: "error" });
    const again = mine
      ? h("button", { class: "quiet", onclick: () => (box.focus(), (box.value = item.text)) }, "use again")
      : copyButton(() => text.textContent, "answer");
    // What is there is only added to, so that a selection in it stays.
    const grow = ({ firstChild }, all) => firstChild.appendData(all.slice(firstChild.length));
    return [h("div", { class: item.role }, h("b", {}, mine ? "You" : "Model"), fold, text, error, h("div", { class: "row" }, stats, again)), (now) => {
      grow(text, now.text);
      grow(thoughts, now.reasoning);
      fold.hidden = !now.reasoning;
      set(stats, now.stats);
      set(error, now.error);
      again.hidden = !now.text;
    }];
  };
  const forgotten = h("p", { class: "dim" });
  const list = h("div");
  // So that arrows scroll, and do not go to another cell.
  const log = h("div", { class: "scroll log", role: "log", "aria-label": "transcript", tabIndex: 0 }, forgotten, list);
  const show = keyed(list, turn);

  const box = h("textarea", {
    rows: 2, "aria-label": "message", placeholder: "Enter sends, Shift+Enter makes a new line",
    onkeydown: (event) => {
      if (event.key === "Escape") stop();
      // 229: Safari's Enter that ends a composition.
      if (event.key !== "Enter" || event.shiftKey || event.isComposing || event.keyCode === 229) return;
      event.preventDefault();
      event.repeat || send();
    },
  });
  const knobs = KNOBS.map(([name, step]) => [name, h("input", { type: "number", min: 0, step })]);
  const system = h("textarea", { rows: 2 });
  const send = async () => {
    const text = box.value;
    const fields = { text: text.slice(0, MOST), system: system.value.slice(0, MOST) };
    for (const [name, { value }] of knobs) fields[name] = value === "" ? null : +value;
    if (text.trim() && (await act("send", fields)) && box.value === text) box.value = "";
  };
  const stop = () => busy() && act("stop");
  const go = h("button", { class: "go", onclick: () => (busy() ? stop() : send()) });
  const status = h("span", { class: "dim", role: "status" });
  const labelled = (name, input) => h("label", {}, name, input);

  root.classList.add("chat");
  root.append(log, strip, box,
    h("div", { class: "row" }, go, status, h("span", { class: "grow" }), h("button", { onclick: () => (box.focus(), act("clear")) }, "Clear")),
    h("details", {}, h("summary", {}, "sampling and system prompt"),
      h("div", { class: "row" }, ...knobs.map(([name, input]) => labelled(name, input))), labelled("system prompt", system)));

  watch(["turns", "live", "forgotten"], () => {
    const follows = log.scrollHeight - log.scrollTop - log.clientHeight < 9;
    show([...get("turns"), ...(busy() ? [get("live")] : [])]);
    list.ariaBusy = !!busy();
    set(forgotten, get("forgotten"));
    set(status, get("live").remark ?? "");
    set(go, busy() ? "Stop" : "Send");
    if (follows) log.scrollTop = log.scrollHeight;
  });
  watch(["sampling"], () => {
    for (const [name, input] of [...knobs, ["system", system]])
      if (!input.matches(":focus")) input.value = get("sampling")[name] ?? "";
  });
  let served = true;
  watch(["server"], () => {
    const serves = /ing$/.test(get("server").state);
    go.setAttribute("aria-disabled", !serves);
    // What was refused meanwhile is no longer true.
    if (serves && !served) say("");
    served = serves;
  });
});
