// The timeline panel: a button and a bar for each request and load. Python computes the bars and the explanations.

const KINDS = ["queued", "prefill", "decode", "paused", "slow", "load", "unload"];
const CODE = "lmx_lab.current().timeline().df";

export default panel("Timeline", ({ model, root, head, watch }) => {
  const get = (name) => model.get(name);
  const status = h("p", { class: "grow dim", role: "status" });
  const say = (text) => set(status, text);
  const pause = h("button", {
    onclick: () => ask(model, "change", { paused: !get("paused") }).catch((error) => say(error.message)),
  });
  head.append(status, pause, copyButton(() => CODE, "as DataFrame", "as DataFrame"));
  const legend = h("p", { class: "row legend" }, ...KINDS.map((kind) => h("span", {}, h("i", { class: kind }), kind)));
  const list = h("ul", { class: "lanes" });
  const detail = h("p", { class: "note detail", role: "status", hidden: true });
  const hint = example("No request has run in the last minute. An example:", 'lab.chat("Tell me a story.")');
  root.append(legend, hint, list, detail);

  const explain = async (lane) => {
    try {
      detail.textContent = await ask(model, "explain", { lane });
    } catch (error) {
      detail.textContent = error.message;
    }
    detail.hidden = false;
  };
  const show = keyed(list, ({ id }) => {
    const text = h("span", { class: "dim" });
    const title = h("span");
    const bar = h("div", { class: "lane", role: "img" });
    let drawn;
    const item = h("li", {}, h("button", { class: "quiet", onclick: () => explain(id) }, title, " ", text), bar);
    return [item, (lane) => {
      set(title, lane.title);
      set(text, lane.text);
      const now = JSON.stringify(lane.parts);
      if (now === drawn) return;
      drawn = now;
      bar.setAttribute("aria-label", lane.parts.map((part) => part[3]).slice(0, 6).join("; "));
      bar.replaceChildren(...lane.parts.map(([kind, left, width, title]) =>
        h("i", { class: kind, title, style: `left:${left}%;width:${width}%` })));
    }];
  });
  watch(["lanes", "problem", "seconds", "paused"], () => {
    const lanes = get("lanes") ?? [];
    show(lanes);
    hint.hidden = !get("lanes") || lanes.length > 0 || get("problem") !== "";
    legend.hidden = !lanes.length;
    pause.textContent = get("paused") ? "Resume" : "Pause";
    say(get("problem") || (get("paused") ? "Paused" : lanes.length ? `${get("seconds").toFixed(2)} s` : ""));
  });
});
