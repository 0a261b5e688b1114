// The metrics panel: current values, which are also the legend, small charts, and a hidden table of each chart for
// screen readers.

const HEIGHT = 120;
// Distances between the labels of an axis of counts.
const COUNTS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000];
const DASHES = [[], [7, 4], [2, 3]];
const CODE = "lmx_lab.current().metrics().df";

export default panel("Metrics", ({ model, root, head, watch }) => {
  const get = (name) => model.get(name);
  const status = h("p", { class: "grow", role: "status" });
  const say = (text) => (status.textContent = text);
  const change = (fields) => ask(model, "change", fields).catch((error) => say(error.message));
  const pause = h("button", { onclick: () => change({ paused: !get("paused") }) });
  const minutes = h("select", { "aria-label": "window", onchange: () => change({ minutes: +minutes.value }) },
    ...[1, 5, 15].map((value) => h("option", { value }, value + " min")));
  const job = h("p");
  const grid = h("div", { class: "charts" });
  const clients = h("ul", { "aria-label": "running requests" });
  const showClients = keyed(clients, ({ id }) => {
    const texts = [h("b"), h("span", { class: "grow" }), h("span", { class: "dim number" })];
    const stop = h("button", {
      "aria-label": "Stop " + id, title: "stop the request; its client gets an error",
      // The button disappears.
      onclick: () => (pause.focus(), ask(model, "stop", { request_id: id }).catch((error) => say(error.message))),
    }, "Stop");
    return [h("li", { class: "row" }, ...texts, stop), ({ cells }) => texts.forEach((node, at) => set(node, cells[at]))];
  });
  const failed = h("summary");
  const list = h("ul");
  const failures = h("details", {}, failed, list);
  const hint = example("No request has been measured in this window. An example:", 'lab.chat("Tell me a story.")');
  head.append(status, minutes, pause, copyButton(() => say("Copied: " + CODE) && CODE, "as DataFrame", "as DataFrame"));
  root.append(job, hint, grid, clients, failures);

  // Called whenever a chart is drawn, because the colours depend on the theme.
  const paint = (node, property = "color") => () => getComputedStyle(node)[property];
  const cells = [];
  let columns, drawn = 0, seen;
  const charts = get("charts").map(({ title, digits, least, names, lines }) => {
    const first = cells.length;
    const write = (value) => value?.toFixed(digits) ?? "–";
    const marks = names.map((_, at) => h("i", { class: "mark" + at, hidden: at >= lines }));
    const box = h("div", { role: "img", "aria-label": title + " over time" });
    const body = h("tbody");
    const row = (tag, texts) => h("tr", {}, ...texts.map((text) => h(tag, {}, text)));
    grid.append(h("figure", {},
      h("figcaption", { class: "row" }, h("span", {}, title), ...names.map((name, at) => {
        const cell = h("b");
        cells.push((value) => (cell.textContent = write(value)));
        return h("span", {}, marks[at], name + " ", cell);
      })),
      box,
      h("div", { class: "hidden" }, h("table", {}, h("thead", {}, row("th", ["time", ...names])), body))));
    const axis = (size, more) => ({
      ...more, size, stroke: paint(box), ticks: { show: false }, grid: { width: 1, stroke: paint(box, "borderTopColor") },
    });
    const plot = new uPlot({
      width: 300, height: HEIGHT, legend: { show: false }, cursor: { show: false },
      scales: {
        x: { range: () => [get("end") - 60 * get("minutes"), get("end")] },
        y: { range: (_, low, high) => [0, Math.max(1.1 * high, least)] },
      },
      axes: [axis(24, { values: "{HH}:{mm}:{ss}", space: 70 }), axis(46, digits ? {} : { incrs: COUNTS })],
      series: [{}, ...marks.slice(0, lines).map((mark, at) => (
        { stroke: paint(mark), width: 2, dash: DASHES[at] }))],
    }, null, box);
    return {
      plot, box,
      draw() {
        const own = columns.slice(first + 1, first + 1 + names.length);
        plot.setData([columns[0], ...own.slice(0, lines)]);
        // Updated rarely, so that a screen reader reaches the end of the table before it changes.
        if (drawn % 20 === 0) body.replaceChildren(...columns[0].map((at, n) =>
          row("td", [clock(1e3 * at), ...own.map((column) => write(column[n]))])).slice(-10));
      },
    };
  });
  const each = (f) => () => charts.forEach(f);

  const draw = () => {
    if (!seen || document.hidden) return;
    const { buffer, byteOffset, byteLength } = get("frame");
    const all = [...new Float32Array(buffer.slice(byteOffset, byteOffset + byteLength))];
    const size = all.length / (cells.length + 1);
    const end = get("end");
    columns = [(value) => end + value, ...cells.map(() => (value) => (isNaN(value) ? null : value))].map((read, n) =>
      all.slice(n * size, n * size + size).map(read));
    charts.forEach((chart) => chart.draw());
    // The columns of the first three charts, which are 0 without requests.
    hint.hidden = columns.slice(1, 6).some((column) => column.some((value) => value > 0));
    drawn++;
  };
  const observers = [
    new IntersectionObserver((entries) => {
      seen = entries.at(-1).isIntersecting;
      draw();
    }),
    new ResizeObserver(each(({ plot, box }) => box.clientWidth && plot.setSize({ width: box.clientWidth, height: HEIGHT }))),
    new MutationObserver(each(({ plot }) => plot.redraw())),
  ];
  observers[0].observe(root);
  observers[1].observe(root);
  observers[2].observe(document.body, { attributes: true });
  document.addEventListener("visibilitychange", draw);

  watch(["job"], () => {
    job.textContent = get("job");
    job.hidden = !get("job");
  });
  watch(["clients"], () => showClients(get("clients")));
  watch(["failures"], () => {
    const texts = get("failures");
    failures.hidden = !texts.length;
    failed.textContent = "Failed requests, the last at " + texts[0];
    list.replaceChildren(...texts.map((text) => h("li", {}, text)));
  });
  watch(["now"], () => cells.forEach((show, at) => show(get("now")[at])));
  watch(["frame"], draw);
  watch(["minutes", "paused", "server"], () => {
    minutes.value = get("minutes");
    pause.textContent = get("paused") ? "Resume" : "Pause";
    say(get("paused") ? "Paused" : "");
  });
  return () => {
    observers.forEach((observer) => observer.disconnect());
    document.removeEventListener("visibilitychange", draw);
    charts.forEach(({ plot }) => plot.destroy());
  };
});
