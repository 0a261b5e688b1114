// The lens panel: the tokens of an answer, the alternatives of the current one, and the branches.

const KEYS = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10, PageDown: 100, PageUp: -100 };
const FIGURES = ["probability", "entropy", "rank"];
const percent = (logprob) => (logprob === null ? "" : (100 * Math.exp(logprob)).toFixed(2) + " %");
let lenses = 0;

export default panel("Lens", ({ model, root, watch }) => {
  const get = (name) => model.get(name);
  const prefix = "lmx-lens-" + lenses++ + "-";
  const strip = h("p", { class: "error", role: "alert" });
  const showError = (text) => (strip.textContent = text);
  const act = (what, fields) => (showError(""), ask(model, what, fields).catch((error) => showError(error.message)));

  const color = h("select", { onchange: () => (paint(), showScore()) }, ...FIGURES.map((name) => h("option", {}, name)));
  const follow = h("input", { type: "checkbox", onchange: () => act("follow", { follows: follow.checked }) });
  const score = h("button", { onclick: () => act("score") });
  const cancel = h("button", { onclick: () => act("cancel") }, "Cancel");
  const legend = h("span", { class: "legend" });
  const caption = h("p", { class: "dim grow", role: "status" });
  const text = h("div", { class: "scroll tokens", tabIndex: 0, role: "listbox", "aria-label": "tokens" });
  const detail = h("div", { class: "detail" });
  const list = h("ul", { class: "branches", "aria-label": "branches" });
  const hint = example("No answer yet. An example in a cell:", 'lab.chat("The capital of France is", logprobs=5)');
  root.append(
    h("div", { class: "row" }, h("label", {}, "Colour ", color), legend, h("label", {}, follow, " follow the newest answer")),
    strip, hint, h("div", { class: "row" }, caption, score, cancel), text, detail, list);

  let current = -1;
  // A token stays current while the pointer moves to its alternatives.
  let pinned = false;
  const tokens = () => get("answer").tokens ?? [];
  const value = (token) => (color.value === "rank" ? token[4] : color.value === "entropy" ? token[3]
    : token[2] === null ? null : Math.exp(token[2]));
  const step = (token) => {
    const figure = value(token);
    if (figure === null) return "";
    const above = color.value !== "probability";
    return "step" + get("limits")[color.value].filter((limit) => (above ? figure > limit : figure < limit)).length;
  };
  const paint = () => {
    const all = tokens();
    [...text.children].forEach((node, at) => (node.className = all[at][1] + " " + step(all[at])));
    if (current >= 0) text.children[current]?.classList.add("current");
    const sign = color.value === "probability" ? ["≥ ", "< "] : ["≤ ", "> "];
    const limits = get("limits")[color.value];
    legend.replaceChildren(...[...limits, limits.at(-1)].map((limit, at) =>
      h("span", { class: "step" + at }, sign[+(at === limits.length)] + limit)));
  };
  // The log-probabilities of an answer of llama.cpp come without entropies and high ranks; scoring computes them.
  const showScore = () => {
    const { caption: line, scored } = get("answer");
    const missing = color.value !== "probability" && tokens().some((token) => value(token) === null);
    score.hidden = (scored && !missing) || !line || Boolean(get("busy"));
    set(score, missing ? "Compute the " + (color.value === "rank" ? "ranks" : "entropies") : "Score");
  };
  const branch = (token) => act("branch", { at: current, token });
  const row = ([shown, logprob, id], chosen) => {
    const possible = !get("answer").refusal && id !== null && !get("busy");
    const name = possible ? h("button", {
      class: "quiet", title: "branch with this token", "aria-label": "branch with " + shown, onclick: () => branch(id),
    }, shown) : h("span", {}, shown);
    const cost = logprob === null || chosen === null ? "" : (logprob - chosen).toFixed(2);
    return h("tr", {}, h("td", {}, name), h("td", { class: "number bar", style: "--bar:" + Math.exp(logprob ?? -99) },
      percent(logprob)), h("td", { class: "number" }, cost));
  };
  const choose = (at, scroll) => {
    const all = tokens();
    const { refusal } = get("answer");
    const hadFocus = detail.contains(document.activeElement);
    text.children[current]?.classList.remove("current");
    text.children[current]?.setAttribute("aria-selected", false);
    current = Math.max(0, Math.min(at, all.length - 1));
    const node = text.children[current];
    if (!node) return detail.replaceChildren();
    node.classList.add("current");
    node.setAttribute("aria-selected", true);
    text.setAttribute("aria-activedescendant", node.id);
    if (scroll) node.scrollIntoView({ block: "nearest" });
    const [shown, part, logprob, entropy, rank, id, others] = all[current];
    const figures = ["token " + current, percent(logprob), entropy === null ? "" : "entropy " + entropy.toFixed(2),
      rank === null ? "" : "rank " + rank, part === "text" ? "" : part].filter(Boolean);
    const rows = others.some((other) => other[2] === id && other[0] === shown) ? others : [[shown, logprob, id], ...others];
    detail.replaceChildren(
      h("p", {}, h("code", {}, shown), " " + figures.join(" · ")),
      h("table", {}, h("thead", {}, h("tr", {}, ...["alternative", "probability", "difference"].map((name) =>
        h("th", { scope: "col" }, name)))), h("tbody", {}, ...rows.map((other) => row(other, logprob)))),
      h("p", { class: "dim" }, refusal && "Alternatives cannot be clicked, because " + refusal + "."));
    if (hadFocus) text.focus();
  };
  const place = ({ target }) => [...text.children].indexOf(target.closest("[role=option]"));
  text.addEventListener("pointerover", (event) => {
    const at = place(event);
    if (at >= 0 && !pinned) choose(at);
  });
  text.addEventListener("click", (event) => {
    const at = place(event);
    pinned = at >= 0 && !(pinned && at === current);
    if (at >= 0) choose(at);
  });
  text.addEventListener("focus", () => current < 0 && choose(0));
  text.addEventListener("keydown", (event) => {
    const move = { Home: -1e9, End: 1e9, ...KEYS }[event.key];
    if (event.key === "Enter") {
      // Otherwise the same key would press the button.
      event.preventDefault();
      detail.querySelector("button")?.focus();
    }
    if (event.key === "Escape") pinned = false;
    if (move === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    pinned = true;
    choose(current + move, true);
  });

  const showRows = keyed(list, (item) => {
    const show = h("button", { class: "quiet", onclick: () => act("show", { name: item.id }) });
    const figures = h("span", { class: "dim" });
    const words = h("span");
    const prune = h("button", {
      class: "quiet", "aria-label": "remove " + item.id, onclick: () => act("prune", { name: item.id }),
    }, "remove");
    const node = h("li", { class: "row" }, show, figures, words, prune);
    return [node, ({ id, depth, place, tokens: count, logprob, text: shown, shown: isShown }) => {
      node.style.paddingInlineStart = depth * 16 + "px";
      set(show, id);
      show.setAttribute("aria-pressed", isShown);
      set(figures, [place, count, logprob?.toFixed(2)].filter(Boolean).join(" · "));
      set(words, shown);
      prune.hidden = !depth;
    }];
  });
  watch(["answer"], () => {
    const { caption: line = "", text: plain = "", scored, at } = get("answer");
    const hadFocus = detail.contains(document.activeElement);
    current = -1;
    pinned = false;
    text.removeAttribute("aria-activedescendant");
    text.replaceChildren(...(scored ? tokens().map(([shown], at) =>
      // A line may break before a space, which is a visible character.
      h("span", { role: "option", id: prefix + at, "aria-selected": false }, shown.replaceAll("·", "\u200b·"))) : [plain]));
    text.setAttribute("role", scored ? "listbox" : "group");
    detail.replaceChildren();
    set(caption, line);
    text.hidden = detail.hidden = !line;
    paint();
    if (scored && at != null) choose(at, true);
    if (hadFocus) text.focus();
  });
  watch(["busy", "answer"], () => {
    set(caption, get("busy") || (get("answer").caption ?? ""));
    showScore();
    cancel.hidden = !get("busy");
    if (current >= 0) choose(current);
  });
  watch(["branches"], () => showRows(get("branches")));
  watch(["follows"], () => (follow.checked = get("follows")));
  watch(["error"], () => showError(get("error")));
  watch(["answer", "error"], () => (hint.hidden = Boolean(get("answer").caption || get("error"))));
}, (get) => get("answer").model ?? "");
