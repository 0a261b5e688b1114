// The models panel. Texts, numbers and possible actions come from Python; the view displays them.

const ADDRESSES = [["url", "local"], ["lan_url", "LAN"], ["proxy_url", "browser"]];
const HEAD = ["model", "kind", "format", "engine", "size", "quantization", "context", "fits", "state", ""];

/**
 * Send the fields in a POST request to the first address of the server that this page can reach, without the kernel, because it may
 * be busy. Loopback is used only if the page comes from this machine, because elsewhere it would be the reader's own machine.
 * `signal` aborts further requests.
 */
const direct = async (model, path, fields, signal) => {
  const { url, proxy_url, proxy_path } = model.get("server");
  const local = /^(localhost|127\.0\.0\.1|\[::1])$/.test(location.hostname) || location.protocol === "vscode-webview:";
  for (const base of [local && url + "/", proxy_path, proxy_url]) {
    if (!base) continue;
    const response = await fetch(new URL(path, new URL(base, location.href)), {
      method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(fields), signal,
    }).catch(() => null);
    if (response?.ok) return response.json();
  }
  throw new Error("no response");
};

export default panel("Models", ({ model, root, head, watch }) => {
  const get = (name) => model.get(name);
  const serves = () => isServing(get("server"));

  // An error of this view's own request takes precedence over the error of the panel, which all views display.
  const message = h("span", { class: "grow" });
  const strip = h("div", { class: "error row", role: "alert" }, message,
    h("button", { class: "quiet", onclick: () => (input.focus(), act("dismiss")) }, "dismiss"));
  const showError = (text) => {
    set(message, text || get("error"));
    strip.hidden = !message.textContent;
  };
  const fail = (error) => showError(error.message);
  const act = (what, fields, fallback) => (showError(""), ask(model, what, fields, fallback).catch(fail));

  const place = h("span", { class: "dim grow" });
  const pinned = h("span", { class: "dim" });
  const links = ADDRESSES.map(([key, label]) => {
    const code = h("code");
    const line = h("span", { class: "row" }, h("span", { class: "dim" }, label), code,
      copyButton(() => get("server")[key], label + " address"));
    return [key, code, line];
  });

  const image = h("img", { alt: "QR code of the LAN address", width: 180, height: 180 });
  const code = h("details", {}, h("summary", {}, "QR code for phones"), image);
  const jobs = h("div");
  const announcement = h("p", { class: "hidden", role: "status" });
  const showJobs = keyed(jobs, ({ id }) => {
    const text = h("span");
    const bar = h("progress", { "aria-label": id });
    const detail = h("span", { class: "dim" });
    const buttons = Object.entries({
      Cancel: () => act("cancel", { model: id }),
      Wait: () => unload(id, true),
      "Stop now": () => unload(id, false),
    }).map(([name, onclick]) => h("button", { onclick, "aria-label": name + " " + id }, name));
    return [h("div", { class: "row job" }, h("b", {}, id), text, bar, detail, ...buttons), (job) => {
      set(text, job.text);
      set(detail, job.detail);
      job.fraction == null ? bar.removeAttribute("value") : (bar.value = job.fraction);
      bar.hidden = job.actions.includes("Stop now");
      for (const button of buttons) button.hidden = !job.actions.includes(button.textContent);
    }];
  });

  const load = (id) => serves() && act("load", { model: id });
  const unload = (id, wait) => serves() && act("unload", { model: id, wait }, "admin/models/unload");
  const body = h("tbody");
  const showRows = keyed(body, ({ id }) => {
    const cells = HEAD.slice(2).map((_, at) => h("td", { class: "c" + at }));
    const button = h("button", { onclick: () => (button.textContent === "Load" ? load : unload)(id) });
    return [h("tr", {}, h("th", { scope: "row" }, id), ...cells, h("td", {}, button)), (row) => {
      row.cells.forEach((text, at) => set(cells[at], text));
      set(button, row.action);
      button.hidden = !row.action;
      button.setAttribute("aria-label", row.action + " " + id);
      button.setAttribute("aria-disabled", !serves());
    }];
  });
  let lastInput = "";
  const submit = async () => {
    const text = input.value.trim();
    if (text && (await load(text))) {
      lastInput = text;
      input.value = "";
    }
  };
  // Not a form: in a cell, JupyterLab prevents Enter from submitting it.
  const input = h("input", {
    class: "grow", "aria-label": "model to load", placeholder: "id, path, or name on the Hub", spellcheck: false,
    // A handler that returns false would cancel all other keys, therefore the braces.
    onkeydown: ({ key }) => {
      if (key === "Enter") submit();
    },
  });
  const go = h("button", { onclick: submit }, "Load");
  const refresh = () => ask(model, "refresh").catch(fail);
  const caption = h("caption");
  const engines = h("p", { class: "dim engines" });
  const hint = example("There are no models yet. This downloads a small one:", 'lab.load("smollm2-135m")');
  const list = h("details", { open: !get("compact"), ontoggle: () => list.open && refresh() },
    h("summary", { hidden: !get("compact") }, "models"),
    h("div", { class: "row pick" }, input, go, h("button", { onclick: refresh }, "Refresh")),
    h("div", { class: "scroll", tabIndex: 0, role: "group", "aria-label": "list of models" },
      h("table", {}, caption,
        h("thead", {}, h("tr", {}, ...HEAD.map((name, at) => h("th", { scope: "col", class: "c" + (at - 1) }, name)))), body)),
    hint, engines);

  root.classList.add("models");
  head.append(pinned, place);
  root.append(
    h("div", { class: "row" }, ...links.map(([, , line]) => line)), code, strip, jobs, announcement, list);
  watch(["error"], () => {
    showError("");
    // Restore the input of a load that has failed, so that it can be corrected.
    if (get("error")) input.value ||= lastInput;
  });
  watch(["jobs"], () => {
    showJobs(get("jobs"));
    if (!get("jobs").length) showError("");
    // Without the remaining seconds, which a screen reader would read each second.
    set(announcement, get("jobs").map((job) => job.id + ": " + job.text.replace(/ \(\d+ s\)$/, "")).join("; "));
  });
  watch(["rows", "caption", "engines", "server"], () => {
    const { place: where, pinned: pins } = get("server");
    set(place, where);
    set(pinned, pins.length ? "also loaded: " + pins.join(", ") : "");
    for (const [key, code, line] of links) {
      set(code, get("server")[key] ?? "");
      line.hidden = !get("server")[key];
    }
    const { phone_code: source } = get("server");
    code.hidden = !source;
    if (source && image.src !== source) image.src = source;
    go.setAttribute("aria-disabled", !serves());
    set(caption, get("caption"));
    set(engines, get("engines"));
    engines.hidden = !get("engines");
    showRows(get("rows"));
    hint.hidden = get("rows").length || !get("caption");
  });
});
