// The events panel: a window over the rows in Python, the text of one session, and calls that wait for a decision.

// Height of a row in pixels, as in events.css; number of rows that are drawn beyond each edge; minimum time between two
// requests for rows that were not caused by scrolling.
const ROW = 26, MARGIN = 12, INTERVAL_MS = 2000;
const MAX_CHARACTERS = 1e5;
const GROUPS = ["turns", "text", "tools", "permissions", "sessions", "daemon", "other"];
const HEAD = ["time", "event", "session", "content"];
const TONES = { live: "good", waiting: "warn", closed: "bad" };
const CLOCK = { hour: "2-digit", minute: "2-digit", second: "2-digit", fractionalSecondDigits: 3 };
const CODE = 'lmx_lab.current().panel("events").df';

export default panel("Events", ({ model, root, head, watch }) => {
  const get = (name) => model.get(name);
  const strip = h("p", { class: "error", role: "alert" });
  const say = (text) => set(strip, text);
  const act = (what, fields) => (say(""), ask(model, what, fields).catch((error) => say(error.message)));
  const filter = (fields) => act("filter", fields);
  // As in Python: ids of the same minute have the same beginning.
  const short = (id) => (id.length > 8 ? "…" + id.slice(-8) : id);

  const pill = h("span", { role: "status" });
  const place = h("code");
  const reconnect = h("button", { onclick: () => act("reconnect") }, "Reconnect");
  const problem = h("p", { class: "note" });

  // Calls that wait for a decision.
  const waiting = h("div", { class: "scroll waiting" });
  const announcement = h("p", { class: "hidden", role: "status" });
  const showWaiting = keyed(waiting, ({ id, tool }) => {
    const session = h("span", { class: "dim grow" });
    const call = h("pre", { class: "scroll", tabIndex: 0, "aria-label": "arguments" });
    const expiry = h("span", { class: "dim" });
    const button = (name, decision, scope = "once") => h("button", {
      "aria-label": name + ": " + tool,
      // The second click of a double click was meant for the previous call.
      onclick: ({ detail }) => detail > 1 || act("decide", { permission: id, decision, scope }),
    }, name);
    return [h("div", { class: "wait", role: "group", "aria-label": "decision about " + tool },
      h("div", { class: "row" }, h("span", { class: "pill warn" }, "decision needed"), h("b", {}, tool), session),
      call,
      h("div", { class: "row" }, button("Allow once", "allow"), button("Allow in this session", "allow", "session"),
        button("Deny", "deny"), expiry)), (now) => {
      set(session, "in " + now.session);
      set(call, now.arguments);
      set(expiry, `denied automatically at ${clock(now.expires_at)}`
        + (now.omitted ? `; ${now.omitted} more characters of the arguments are in its event` : ""));
    }];
  });

  // The filter.
  const session = h("select", { "aria-label": "session", onchange: () => filter({ session: session.value }) });
  const showSessions = keyed(session, ({ id }) => {
    const option = h("option", { value: id });
    return [option, ({ name, status }) => set(option, status ? `${name} · ${status}` : name)];
  });
  let typing;
  const search = h("input", {
    type: "search", class: "grow", "aria-label": "search text", placeholder: "text in rows", maxLength: 200, spellcheck: false,
    oninput: () => {
      clearTimeout(typing);
      typing = setTimeout(() => filter({ text: search.value }), 250);
    },
  });
  // Keys on a checkbox are not shortcuts of the notebook.
  const checkbox = (onchange) => h("input", { type: "checkbox", checked: true, "data-lm-suppress-shortcuts": "", onchange });
  const boxes = GROUPS.map((group) => [group, checkbox(() => filter({ groups: GROUPS.filter((_, at) => boxes[at][1].checked) }))]);
  const follow = checkbox(() => draw());

  // The session of the filter.
  const status = h("span");
  const activity = h("span", { class: "dim grow" });
  const stop = h("button", { onclick: () => act("cancel", { session: get("live").id }) }, "Stop");
  const thoughts = h("div", { class: "text dim" });
  const fold = h("details", {}, h("summary", {}, "thoughts"), thoughts);
  const text = h("div", { class: "text" });
  const output = h("div", { class: "scroll output", tabIndex: 0, role: "group", "aria-label": "text of the session" }, fold, text);
  const sessionBox = h("div", { class: "session" }, h("div", { class: "row" }, status, activity, stop), output);
  // Append to the text node, so that a selection in it stays.
  const write = (node, all) => {
    const old = node.firstChild;
    old?.data && all.startsWith(old.data) ? old.appendData(all.slice(old.length)) : set(node, all);
  };

  // The event of one row.
  let json = "";
  const shown = h("pre", { class: "scroll", tabIndex: 0, "aria-label": "event as JSON" });
  const close = () => {
    detail.hidden = true;
    scroller.focus({ preventScroll: true });
  };
  const detail = h("div", { class: "detail", hidden: true },
    h("div", { class: "row" }, h("span", { class: "grow" }, "event as JSON"),
      copyButton(() => json, "event as JSON", "copy as JSON"), h("button", { class: "quiet", onclick: close }, "close")),
    shown);
  const open = async (row) => {
    const result = await act("event", { row });
    if (result == null) return;
    json = result;
    set(shown, json.length > MAX_CHARACTERS ? json.slice(0, MAX_CHARACTERS) + "\n… copy it for the rest" : json);
    detail.hidden = false;
  };

  // The rows. Only visible ones are elements, between two spaces with the height of all others.
  const body = h("tbody");
  const space = () => h("tbody", { "aria-hidden": true }, h("tr", {}, h("td", { class: "space", colSpan: HEAD.length })));
  const above = space();
  const below = space();
  const table = h("table", { "aria-label": "events" },
    h("thead", {}, h("tr", {}, ...HEAD.map((name) => h("th", { scope: "col" }, name)))), above, body, below);
  const scroller = h("div", { class: "scroll rows", tabIndex: 0, role: "group", "aria-label": "rows" }, table);
  let names = new Map();
  const showRows = keyed(body, ({ id }) => {
    const time = h("td");
    const name = h("span");
    const batches = h("span");
    const kind = h("button", { class: "quiet", onclick: () => open(id) }, name, batches);
    const from = h("td");
    const content = h("bdi", { dir: "ltr" });
    const row = h("tr", {}, time, h("td", {}, kind), from, h("td", {}, content));
    return [row, (now) => {
      row.className = `${now.tone} ${now.mark ? "mark" : now.grows ? "grows" : ""}`;
      row.ariaRowIndex = now.number + 2;
      set(time, now.at ? clock(now.at, CLOCK) : "");
      set(name, now.kind);
      set(batches, now.batches > 1 ? ` ×${now.batches}` : "");
      kind.hidden = !now.at;
      set(from, names.get(now.session) ?? short(now.session ?? ""));
      set(content, now.text);
    }];
  });

  // Received rows by number.
  const known = new Map();
  let numbering, base = 0, total = 0, requesting = false, moved = false, requestedAt = -INTERVAL_MS, timer;
  // The position that was set by this code, whose scroll event is ignored.
  let ownTop;
  const scrollTo = (top) => {
    scroller.scrollTop = top;
    ownTop = scroller.scrollTop;
  };
  const receive = (part) => {
    if (part.numbering !== numbering) {
      known.clear();
      numbering = part.numbering;
      base = part.base;
      follow.checked = true;
    }
    // Keep the visible rows in their place when older ones are removed.
    if (!follow.checked && part.base > base) scrollTo(scroller.scrollTop - (part.base - base) * ROW);
    ({ base, total } = part);
    part.rows.forEach((row, at) => known.set(part.first + at, row));
  };
  const request = async (first, byUser) => {
    clearTimeout(timer);
    const wait = byUser ? 0 : requestedAt + INTERVAL_MS - performance.now();
    if (requesting) return;
    if (wait > 0) {
      timer = setTimeout(draw, wait);
      return;
    }
    requesting = true;
    moved = false;
    requestedAt = performance.now();
    try {
      const part = await ask(model, "rows", { first, count: 100 });
      if (part.numbering === numbering) receive(part);
    } catch (error) {
      say(error.message);
    }
    requesting = false;
    draw(moved);
  };
  const draw = (byUser = false) => {
    const height = scroller.clientHeight;
    const top = follow.checked ? total * ROW - height : Math.min(scroller.scrollTop, total * ROW);
    const from = Math.max(0, Math.floor(top / ROW) - MARGIN);
    const to = Math.min(total, Math.ceil((top + height) / ROW) + MARGIN);
    const visible = [];
    for (let number = from; number < to; number++)
      visible.push({ ...(known.get(base + number) ?? { id: "missing" + number, kind: "", text: "…" }), number });
    const hadFocus = body.contains(document.activeElement);
    above.firstChild.firstChild.style.height = from * ROW + "px";
    below.firstChild.firstChild.style.height = (total - to) * ROW + "px";
    table.setAttribute("aria-rowcount", total + 1);
    showRows(visible);
    if (hadFocus && !body.contains(document.activeElement)) scroller.focus({ preventScroll: true });
    if (follow.checked) scrollTo(scroller.scrollHeight);
    for (const at of known.keys()) if (at < base + from - 100 || at >= base + to + 100) known.delete(at);
    const missing = visible.find(({ at }) => !at);
    if (missing) request(Math.max(base, base + missing.number - MARGIN), byUser);
  };
  scroller.onscroll = () => {
    if (scroller.scrollTop === ownTop) return;
    ownTop = null;
    follow.checked = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < ROW;
    moved = true;
    draw(true);
  };
  const sizes = new ResizeObserver(() => draw());
  sizes.observe(scroller);

  const count = h("span", { class: "dim grow" });
  root.classList.add("events");
  const hint = example("No session has run yet. An example:", 'lab.daemon.session().run("Say hello.")');
  head.append(pill, place, reconnect);
  root.append(problem, strip, announcement, waiting,
    h("div", { class: "row" }, session, search, h("label", {}, follow, " follow")),
    h("div", { class: "row", role: "group", "aria-label": "kinds of events" },
      ...boxes.map(([group, box]) => h("label", {}, box, " " + group))),
    sessionBox, hint, scroller, detail,
    h("div", { class: "row" }, count, copyButton(() => CODE, "code for a DataFrame", "as DataFrame"),
      h("button", { class: "quiet", onclick: () => act("clear") }, "clear")));

  watch(["connection", "server"], () => {
    const { state, text: label, place: where, error } = get("connection");
    // Without a kernel, its last connection is not known to be open.
    pill.hidden = get("server").state === "disconnected";
    pill.className = "pill " + (TONES[state] ?? "");
    set(pill, label);
    set(place, where);
    set(problem, error);
    problem.hidden = !error;
    reconnect.hidden = state !== "closed";
  });
  watch(["permissions"], () => {
    const permissions = get("permissions");
    const hadFocus = waiting.contains(document.activeElement);
    showWaiting(permissions);
    const calls = permissions.map(({ tool, session: where }) => `${tool} in ${where}`).join(", ");
    set(announcement, calls && "decision needed: " + calls);
    // The focus does not move to a button of the next call, on which a second Enter would decide before it is read.
    if (hadFocus && !waiting.contains(document.activeElement)) scroller.focus({ preventScroll: true });
  });
  watch(["sessions", "connection"], () => {
    hint.hidden = get("connection").state !== "live" || get("sessions").length;
  });
  watch(["sessions", "filter"], () => {
    const { session: id, groups, text: searched } = get("filter");
    const all = get("sessions");
    names = new Map(all.map((each) => [each.id, each.name]));
    const unknown = id && !names.has(id) ? [{ id, name: short(id) }] : [];
    showSessions([{ id: "", name: "all sessions" }, ...unknown, ...all]);
    session.value = id;
    for (const [group, box] of boxes) box.checked = groups.includes(group);
    if (!search.matches(":focus")) search.value = searched;
    sessionBox.hidden = !id;
  });
  watch(["live"], () => {
    const live = get("live");
    const atEnd = output.scrollHeight - output.scrollTop - output.clientHeight < 9;
    const busy = /running|waiting|queued/.test(live.status);
    set(status, live.status ?? "no events of this session yet");
    status.className = "pill " + (live.status === "waiting" ? "warn" : busy ? "good" : "");
    set(activity, live.activity ?? "");
    stop.hidden = !busy;
    write(thoughts, live.thoughts ?? "");
    write(text, live.text ?? "");
    fold.hidden = !live.thoughts;
    output.hidden = !live.thoughts && !live.text;
    if (atEnd) output.scrollTop = output.scrollHeight;
  });
  watch(["frame"], () => {
    receive(get("frame"));
    set(count, get("frame").summary);
    draw();
  });
  return () => {
    sizes.disconnect();
    clearTimeout(timer);
    clearTimeout(typing);
  };
});
