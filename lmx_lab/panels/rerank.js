// The rerank panel: a form, and one page of the result. Python sorts, pages and copies the rows.

const COLUMNS = ["rank", "score", "document", "index", "change"];
// Python refuses longer texts, and the kernel's WebSocket does not transfer much longer ones.
const MAX_CHARACTERS = 2e6 + 1;

export default panel("Rerank", ({ model, root, watch }) => {
  const get = (name) => model.get(name);
  const strip = h("p", { class: "error", role: "alert" });
  const showError = (text) => {
    strip.textContent = text;
    strip.hidden = !text;
  };
  const act = (what, fields) => (showError(""), ask(model, what, fields).catch((error) => showError(error.message)));

  const query = h("input", { value: get("request").query ?? "" });
  const documents = h("textarea", {
    rows: 5, placeholder: "one per line, or a JSON list of texts", value: get("request").documents ?? "",
  });
  const top = h("input", { type: "number", min: 1, placeholder: "all" });
  const rank = () => act("rank", {
    query: query.value, documents: documents.value.slice(0, MAX_CHARACTERS), top_n: top.value ? +top.value : null,
  });
  const go = h("button", { class: "go", title: "Ctrl+Enter", onclick: () => (get("busy") ? act("cancel") : rank()) });
  const form = h("div", {
    hidden: !get("form"),
    onkeydown: (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !get("busy")) rank();
    },
  },
    h("label", { class: "field" }, "Query", query), h("label", { class: "field" }, "Documents", documents),
    h("div", { class: "row" }, h("label", {}, "Top ", top), go));

  const caption = h("p", { class: "dim grow", role: "status" });
  const heads = COLUMNS.map((column) =>
    h("th", { scope: "col" }, h("button", { onclick: () => act("sort", { column }) }, column)));
  const body = h("tbody");
  const range = h("span");
  const pageButton = (by, name) => h("button", { onclick: () => act("page", { page: get("table").page + by }) }, name);
  const pager = h("div", { class: "row" }, pageButton(-1, "Previous"), range, pageButton(1, "Next"));
  const copy = copyButton(() => act("tsv"), "as TSV", "copy as TSV");
  const table = h("div", { class: "scroll", tabIndex: 0, role: "group", "aria-label": "result" },
    h("table", {}, h("thead", {}, h("tr", {}, ...heads)), body));
  const hint = example("No result yet. An example in a cell:", 'lab.rerank("salty water", ["The sea.", "A river."])');
  root.append(form, strip, hint, h("div", { class: "row" }, caption, copy), table, pager);

  const showRow = ({ cells, change, bar, more }) => {
    const [rank, score, start, index, arrow] = cells;
    const text = h("span", {}, start);
    const button = h("button", {
      class: "quiet", hidden: !more, "aria-expanded": false,
      onclick: async () => {
        const open = text.textContent === start;
        text.textContent = (open && (await act("document", { rank }))) || start;
        button.textContent = open ? "less" : "more";
        button.setAttribute("aria-expanded", open);
      },
    }, "more");
    return h("tr", {},
      h("td", { class: "number" }, rank), h("td", { class: "number bar", style: "--bar:" + bar }, score),
      h("td", { class: "document" }, text, button), h("td", { class: "number" }, index),
      h("td", { class: "number" }, h("span", { "aria-hidden": true }, arrow), h("span", { class: "hidden" }, change)));
  };
  watch(["table"], () => {
    const { rows = [], sort, descending, pages, range: text } = get("table");
    heads.forEach((head, at) =>
      head.setAttribute("aria-sort", COLUMNS[at] !== sort ? "none" : descending ? "descending" : "ascending"));
    const hadFocus = body.contains(document.activeElement);
    body.replaceChildren(...rows.map(showRow));
    if (hadFocus) table.focus();
    hint.hidden = rows.length || !get("form");
    table.hidden = copy.hidden = !rows.length;
    pager.hidden = !(pages > 1);
    range.textContent = text;
  });
  watch(["busy", "activity", "table"], () => {
    go.textContent = get("busy") ? "Cancel" : "Rank";
    caption.textContent = get("busy") ? get("activity") : get("table").caption ?? "";
  });
  watch(["error"], () => showError(get("error")));
}, (get) => get("table").model ?? get("server").others?.join(", ") ?? "");
