// The rerank panel: a form, and a page of the result. The rows are sorted, paged and copied in Python.

const COLUMNS = ["rank", "score", "document", "index", "change"];
// Python refuses what is longer; more than that does not get through the kernel's socket.
const MOST = 2e6 + 1;

export default panel("Rerank", ({ model, root, watch }) => {
  const get = (name) => model.get(name);
  const strip = h("p", { class: "error", role: "alert" });
  const complain = (text) => {
    strip.textContent = text;
    strip.hidden = !text;
  };
  const act = (what, fields) => (complain(""), ask(model, what, fields).catch((error) => complain(error.message)));

  const query = h("input", { value: get("asked").query ?? "" });
  const documents = h("textarea", {
    rows: 5, placeholder: "one a line, or a JSON list of texts", value: get("asked").documents ?? "",
  });
  const top = h("input", { type: "number", min: 1, placeholder: "all" });
  const rank = () => act("rank", {
    query: query.value, documents: documents.value.slice(0, MOST), top_n: top.value ? +top.value : null,
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
  const turn = (by, name) => h("button", { onclick: () => act("page", { page: get("table").page + by }) }, name);
  const pager = h("div", { class: "row" }, turn(-1, "Previous"), range, turn(1, "Next"));
  const copy = copyButton(() => act("tsv"), "as TSV", "copy as TSV");
  const table = h("div", { class: "scroll", tabIndex: 0, role: "group", "aria-label": "result" },
    h("table", {}, h("thead", {}, h("tr", {}, ...heads)), body));
  root.append(form, strip, h("div", { class: "row" }, caption, copy), table, pager);

  const showRow = ({ cells, words, bar, more }) => {
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
      h("td", { class: "number" }, h("span", { "aria-hidden": true }, arrow), h("span", { class: "hidden" }, words)));
  };
  watch(["table"], () => {
    const { rows = [], sort, down, pages, range: words } = get("table");
    heads.forEach((head, at) =>
      head.setAttribute("aria-sort", COLUMNS[at] !== sort ? "none" : down ? "descending" : "ascending"));
    const held = body.contains(document.activeElement);
    body.replaceChildren(...rows.map(showRow));
    if (held) table.focus();
    table.hidden = copy.hidden = !rows.length;
    pager.hidden = !(pages > 1);
    range.textContent = words;
  });
  watch(["busy", "doing", "table"], () => {
    go.textContent = get("busy") ? "Cancel" : "Rank";
    caption.textContent = get("busy") ? get("doing") : get("table").caption ?? "";
  });
  watch(["problem"], () => complain(get("problem")));
});
