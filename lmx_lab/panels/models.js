// The models panel. Texts, numbers and possible actions come from Python; the view displays them.

const ADDRESSES = [["url", "local"], ["lan_url", "LAN"], ["proxy_url", "browser"]];
const HEAD = ["model", "kind", "format", "engine", "size", "quantization", "context", "fits", "state", ""];
const AUTO = ["", "automatic"];
let panels = 0;

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

/** Set the options of a <select>, as pairs of value and text; the selected one stays selected if it is still there. */
const fill = (select, options) => {
  const key = JSON.stringify(options);
  if (select.dataset.options === key) return;
  const { value } = select;
  select.replaceChildren(...options.map(([value, text = value]) => h("option", { value }, text)));
  select.dataset.options = key;
  select.value = value;
  if (select.selectedIndex < 0) select.selectedIndex = 0;
};

export default panel("Models", ({ model, root, head, watch }) => {
  const get = (name) => model.get(name);
  const serves = () => isServing(get("server"));
  const stripId = "lmx-models-error-" + panels++;

  // An error of this view's own request takes precedence over the error of the panel, which all views display.
  const message = h("span", { class: "grow" });
  const strip = h("div", { class: "error row", role: "alert" }, message,
    h("button", { class: "quiet", onclick: () => (input.focus(), act("dismiss")) }, "dismiss"));
  message.id = stripId;
  const showError = (text, field = text ? "" : get("error_field")) => {
    set(message, text || get("error"));
    strip.hidden = !message.textContent;
    for (const [name, [, control]] of Object.entries(options)) {
      control.setAttribute("aria-invalid", name === field);
      name === field ? control.setAttribute("aria-describedby", stripId) : control.removeAttribute("aria-describedby");
    }
    if (field in options) showOptions(true);
  };
  const fail = ({ message: text, param }) => {
    showError(text, param);
    options[param]?.[1].focus();
  };
  const act = (what, fields, fallback) => (showError(""), ask(model, what, fields, fallback).catch(fail));

  const place = h("span", { class: "dim grow" });
  const links = ADDRESSES.map(([key, label]) => {
    const code = h("code");
    const line = h("span", { class: "row" }, h("span", { class: "dim" }, label), code,
      copyButton(() => get("server")[key], label + " address"));
    return [key, code, line];
  });

  const pressure = h("p", { class: "note", role: "status" });
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

  const load = (id, given = {}) => serves() && act("load", { model: id, options: given });
  const unload = (id, wait) => serves() && act("unload", { model: id, wait }, "admin/models/unload");
  const resident = h("ul", { "aria-label": "models in memory" });
  const showResident = keyed(resident, ({ id }) => {
    const main = h("span", { class: "pill", title: "the model that answers requests without a model" }, "main");
    const bar = h("div", { class: "share", role: "meter", "aria-label": "memory of " + id, ariaValueMin: "0", ariaValueMax: "100" });
    const memory = h("span", { class: "dim" });
    const idle = h("span", { class: "dim grow" });
    const pin = h("button", {
      "aria-label": "keep " + id + " loaded", title: "other loads and idle time do not unload it",
      onclick: () => act("keep", { model: id, pin: pin.ariaPressed !== "true" }),
    }, "keep loaded");
    const ttl = h("select", {
      "aria-label": "time to live of " + id, title: "time without requests after which it is unloaded",
      onchange: async () => {
        const kept = await act("keep", { model: id, ttl_s: ttl.value === "never" ? ttl.value : +ttl.value });
        // It was refused.
        if (kept === undefined) ttl.value = get("resident").find((row) => row.id === id)?.ttl;
      },
    });
    const button = h("button", { "aria-label": "Unload " + id, "data-model": id, onclick: () => unload(id) }, "Unload");
    const controls = h("span", { class: "row" }, h("label", { class: "dim" }, "time to live ", ttl), pin, button);
    const engine = h("div", { class: "dim" });
    const warning = h("p", { class: "note" });
    const lines = [[h("b", {}, id), main, idle, controls], [bar, memory]].map((parts) => h("div", { class: "row" }, ...parts));
    return [h("li", {}, ...lines, engine, warning), (row) => {
      set(engine, row.engine);
      set(warning, row.warning);
      warning.hidden = !row.warning;
      main.hidden = !row.main;
      set(memory, row.memory);
      set(idle, row.idle);
      bar.hidden = row.fraction == null;
      bar.style.setProperty("--share", row.fraction);
      bar.ariaValueNow = Math.round(100 * row.fraction);
      bar.ariaValueText = row.memory;
      pin.ariaPressed = row.pinned;
      fill(ttl, row.ttls);
      if (!ttl.matches(":focus")) ttl.value = row.ttl;
      ttl.disabled = row.pinned;
      button.hidden = row.pinned;
      button.setAttribute("aria-disabled", row.leaving);
    }];
  });
  const body = h("tbody");
  const showRows = keyed(body, ({ id }) => {
    const cells = HEAD.slice(2).map((_, at) => h("td", { class: "c" + at }));
    const button = h("button", { "data-model": id, onclick: () => load(id) });
    const choose = h("button", {
      class: "quiet", "aria-label": "options of " + id, onclick: () => {
        input.value = id;
        showOptions(true);
        options.engine[1].focus();
      },
    }, "options");
    return [h("tr", {}, h("th", { scope: "row", title: id }, id), ...cells, h("td", { class: "actions" }, button, choose)), (row) => {
      row.cells.forEach((text, at) => set(cells[at], text));
      set(button, row.action);
      choose.hidden = row.action !== "Load";
      button.hidden = !row.action;
      button.setAttribute("aria-label", row.action + " " + id);
      button.setAttribute("aria-disabled", !serves());
    }];
  });
  // The options of a load: their labels and fields, by the names that lab.load uses.
  const options = {
    engine: ["engine", h("select")],
    context_length: ["context length", h("input", { inputMode: "numeric", placeholder: "automatic", size: 10 })],
    draft: ["draft model", h("select")],
    kv_cache_dtype: ["KV cache", h("select")],
    prompt_lookup: ["prompt lookup", h("select")],
    deterministic: ["deterministic", h("input", { type: "checkbox" })],
  };
  const controls = Object.values(options).map(([, control]) => control);
  const property = ({ type }) => (type === "checkbox" ? "checked" : "value");
  const givenOptions = () => {
    const given = {};
    for (const [name, [, control]] of Object.entries(options)) {
      const value = control[property(control)];
      // A text that is not a number is refused in Python, with an error for this field.
      if (value) given[name] = name === "context_length" && +value ? +value : name === "prompt_lookup" ? value === "on" : value;
    }
    return given;
  };
  const showOptions = (open = !form.hidden) => {
    const rows = get("rows");
    const row = rows.find(({ id }) => id === input.value.trim());
    const engines = row ? row.engines : get("choices").engine ?? [];
    // A draft model has the kind of the model, and runs on the same engine.
    const drafts = rows.filter(({ id, cells, engines: own }) =>
      id !== row?.id && cells[0] === (row?.cells[0] ?? "chat") && own.some((engine) => engines.includes(engine)));
    fill(options.engine[1], [AUTO, ...engines.map((name) => [name])]);
    fill(options.draft[1], [["", "none"], ...drafts.map(({ id }) => [id])]);
    fill(options.kv_cache_dtype[1], [AUTO, ...(get("choices").kv_cache_dtype ?? []).map((name) => [name])]);
    fill(options.prompt_lookup[1], [AUTO, ["on"], ["off"]]);
    const count = Object.keys(givenOptions()).length;
    set(more, count ? `options (${count})` : "options");
    form.hidden = !open;
    more.setAttribute("aria-expanded", open);
  };
  const writeOptions = (values) => controls.forEach((control, at) => (control[property(control)] = values[at]));
  // The model and the options of the last load, which are shown again if it fails, so that they can be corrected.
  let last = ["", []];
  const submit = async () => {
    const text = input.value.trim();
    const values = controls.map((control) => control[property(control)]);
    if (text && (await load(text, givenOptions()))) {
      last = [text, values];
      input.value = "";
      writeOptions(values.map((value) => (value === true ? false : value && "")));
      showOptions(false);
    }
  };
  // Not a form: in a cell, JupyterLab prevents Enter from submitting it.
  const input = h("input", {
    class: "grow", "aria-label": "model to load", placeholder: "id, path, or name on the Hub", spellcheck: false,
    // A handler that returns false would cancel all other keys, therefore the braces.
    onkeydown: ({ key }) => {
      if (key === "Enter") submit();
    },
    oninput: () => showOptions(),
  });
  const go = h("button", { onclick: submit }, "Load");
  const more = h("button", { class: "quiet", onclick: () => showOptions(form.hidden) }, "options");
  const form = h("div", {
    class: "row options", role: "group", "aria-label": "options of the load", hidden: true, oninput: () => showOptions(),
    onkeydown: ({ key, target }) => {
      if (key === "Enter" && target.matches("input")) submit();
      if (key === "Escape") {
        showOptions(false);
        more.focus();
      }
    },
  }, ...Object.values(options).map(([name, control]) => h("label", {}, name, control)));
  const refresh = () => ask(model, "refresh").catch(fail);
  const caption = h("caption");
  const engines = h("p", { class: "dim engines" });
  const hint = example("There are no models yet. This downloads a small one:", 'lab.load("smollm2-135m")');
  const list = h("details", { open: !get("compact"), ontoggle: () => list.open && refresh() },
    h("summary", { hidden: !get("compact") }, "models"),
    h("div", { class: "row pick" }, input, go, more, h("button", { onclick: refresh }, "Refresh")), form,
    h("div", { class: "scroll", tabIndex: 0, role: "group", "aria-label": "list of models" },
      h("table", {}, caption,
        h("thead", {}, h("tr", {}, ...HEAD.map((name, at) => h("th", { scope: "col", class: "c" + (at - 1) }, name)))), body)),
    hint, engines);

  const storageNote = h("p", { class: "dim grow", role: "status" });
  const storageList = h("ul", { class: "scroll", tabIndex: 0, "aria-label": "list of what is stored" });
  const showStorage = keyed(storageList, ({ id }) => {
    const [what, size, path] = [h("span", { class: "dim" }), h("span", { class: "number" }), h("div", { class: "dim" })];
    // The first click shows what would be deleted; only the second one, on another button, deletes it.
    const show = (isAsked) => {
      asked.hidden = !isAsked;
      remove.hidden = isAsked || !question.textContent;
    };
    const remove = h("button", { "aria-label": `Delete ${id} …`, onclick: () => (show(true), keep.focus()) }, "Delete …");
    const question = h("p");
    const confirm = h("button", {
      onclick: () => (storageRefresh.focus(), act("remove", { question: question.textContent })),
    });
    const keep = h("button", { "aria-label": "Keep " + id, onclick: () => (show(false), remove.focus()) }, "Keep");
    const asked = h("div", { class: "asked", role: "group", "aria-label": "Delete " + id, hidden: true }, question,
      h("div", { class: "row" }, confirm, keep));
    const line = h("div", { class: "row" }, h("b", { class: "grow" }, id), what, size, remove);
    return [h("li", {}, line, path, asked), ({ cells, remedy, question: text }) => {
      set(what, cells[0]);
      set(size, cells[1]);
      set(path, [cells[2], remedy].filter(Boolean).join(" · "));
      set(confirm, "Delete " + cells[1]);
      confirm.setAttribute("aria-label", `Delete ${cells[1]} of ${id}`);
      if (asked.hidden || text !== question.textContent) {
        set(question, text);
        show(false);
      }
    }];
  });
  const readStorage = () => ask(model, "storage").catch(fail);
  const storageRefresh = h("button", { "aria-label": "Refresh storage", onclick: readStorage }, "Refresh");
  const storage = h("details", { hidden: get("compact"), ontoggle: () => storage.open && readStorage() },
    h("summary", {}, "storage"), h("div", { class: "row pick" }, storageNote, storageRefresh), storageList);

  root.classList.add("models");
  head.append(place);
  root.append(
    h("div", { class: "row" }, ...links.map(([, , line]) => line)), code, strip, pressure, jobs, announcement, resident, list, storage);
  watch(["error", "error_field"], () => {
    if (get("error") && !input.value) {
      input.value = last[0];
      showOptions();
      if (last[1].length) writeOptions(last[1]);
      showOptions();
    }
    showError("");
  });
  watch(["pressure"], () => {
    set(pressure, get("pressure"));
    pressure.classList.toggle("hidden", !get("pressure"));
  });
  watch(["jobs"], () => {
    showJobs(get("jobs"));
    if (!get("jobs").length) showError("");
    // Without the remaining seconds, which a screen reader would read each second.
    set(announcement, get("jobs").map((job) => job.id + ": " + job.text.replace(/ \(\d+ s\)$/, "")).join("; "));
  });
  watch(["rows", "choices"], () => showOptions());
  watch(["storage"], () => {
    const { rows = [], note = "" } = get("storage");
    set(storageNote, note);
    showStorage(rows);
    storageList.hidden = !rows.length;
  });
  watch(["rows", "resident", "caption", "engines", "server"], () => {
    set(place, get("server").place);
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
    // When a model is loaded or unloaded, its other button gets the focus of the one that disappears.
    const focused = document.activeElement;
    const { model: id } = root.contains(focused) ? focused.dataset : {};
    showResident(get("resident"));
    showRows(get("rows"));
    if (id && (focused.hidden || !focused.isConnected)) {
      const next = [...root.querySelectorAll("[data-model]")].find((each) => each.dataset.model === id && each.offsetParent);
      (next ?? (list.open ? input : list.firstChild)).focus();
    }
    hint.hidden = get("rows").length || !get("caption");
  });
});
