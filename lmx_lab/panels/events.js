// The events panel: a window over rows that Python keeps, the text of one session, decisions that somebody has to take.

// The height of a row, in events.css too; rows drawn beyond both edges; milliseconds between two questions that no
// scrolling has asked.
const ROW = 26, AROUND = 12, PATIENCE = 2000;
const MOST_SHOWN = 1e5;
const GROUPS = ["turns", "text", "tools", "permissions", "sessions", "daemon", "other"];
const HEAD = ["time", "event", "session", "what"];
const GOOD = { live: "good", waiting: "warn", closed: "bad" };
const CLOCK = { hour: "2-digit", minute: "2-digit", second: "2-digit", fractionalSecondDigits: 3, hour12: false };
const CODE = 'lmx_lab.current().panel("events").df';

export default panel("Events", ({ model, root, watch }) => {
  const get = (name) => model.get(name);
  const strip = h("p", { class: "error", role: "alert" });
  const say = (text) => set(strip, text);
  const act = (what, fields) => (say(""), ask(model, what, fields).catch((error) => say(error.message)));
  const filter = (fields) => act("filter", fields);

  const pill = h("span", { role: "status" });
  const place = h("code", { class: "grow" });
  const again = h("button", { onclick: () => act("reconnect") }, "Connect again");
  const problem = h("p", { class: "note" });

  // What waits for a decision.
  const waiting = h("div", { class: "scroll asked" });
  const news = h("p", { class: "hidden", role: "status" });
  const showWaiting = keyed(waiting, ({ id, tool }) => {
    const session = h("span", { class: "dim grow" });
    const call = h("pre", { class: "scroll", tabIndex: 0, "aria-label": "arguments" });
    const due = h("span", { class: "dim" });
    const button = (name, decision, scope = "once") => h("button", {
      "aria-label": name + ": " + tool,
      // The second half of a double click is about the call before this one.
      onclick: ({ detail }) => detail > 1 || act("decide", { permission: id, decision, scope }),
    }, name);
    return [h("div", { class: "wait", role: "group", "aria-label": "decision about " + tool },
      h("div", { class: "row" }, h("span", { class: "pill warn" }, "asks"), h("b", {}, tool), session),
      call,
      h("div", { class: "row" }, button("Allow once", "allow"), button("Allow in this session", "allow", "session"),
        button("Deny", "deny"), due)), (now) => {
      set(session, "in " + now.session);
      set(call, now.arguments);
      set(due, `denied by itself at ${new Date(now.expires_at).toLocaleTimeString()}`
        + (now.left_out ? `; ${now.left_out} more characters of the arguments are not shown: see its event` : ""));
    }];
  });

  // Which rows are shown.
  const session = h("select", { "aria-label": "session", onchange: () => filter({ session: session.value }) });
  const showSessions = keyed(session, ({ id }) => {
    const option = h("option", { value: id });
    return [option, ({ name, status }) => set(option, status ? `${name} · ${status}` : name)];
  });
  let typing;
  const search = h("input", {
    type: "search", class: "grow", "aria-label": "text to look for", placeholder: "text in rows", maxLength: 200, spellcheck: false,
    oninput: () => {
      clearTimeout(typing);
      typing = setTimeout(() => filter({ text: search.value }), 250);
    },
  });
  // A key on one of them is no command of the notebook.
  const checkbox = (onchange) => h("input", { type: "checkbox", checked: true, "data-lm-suppress-shortcuts": "", onchange });
  const boxes = GROUPS.map((group) => [group, checkbox(() => filter({ groups: GROUPS.filter((_, at) => boxes[at][1].checked) }))]);
  const follow = checkbox(() => draw());

  // One session.
  const status = h("span");
  const remark = h("span", { class: "dim grow" });
  const stop = h("button", { onclick: () => act("cancel", { session: get("live").id }) }, "Stop");
  const thoughts = h("div", { class: "text dim" });
  const fold = h("details", {}, h("summary", {}, "thoughts"), thoughts);
  const text = h("div", { class: "text" });
  const words = h("div", { class: "scroll words", tabIndex: 0, role: "group", "aria-label": "text of the session" }, fold, text);
  const one = h("div", { class: "one" }, h("div", { class: "row" }, status, remark, stop), words);
  // What is there is only added to, so that a selection in it stays.
  const write = (node, all) => {
    const old = node.firstChild;
    old?.data && all.startsWith(old.data) ? old.appendData(all.slice(old.length)) : set(node, all);
  };

  // One event.
  let whole = "";
  const shown = h("pre", { class: "scroll", tabIndex: 0, "aria-label": "event as JSON" });
  const close = () => {
    detail.hidden = true;
    scroller.focus({ preventScroll: true });
  };
  const detail = h("div", { class: "detail", hidden: true },
    h("div", { class: "row" }, h("span", { class: "grow" }, "event as JSON"),
      copyButton(() => whole, "event as JSON", "copy as JSON"), h("button", { class: "quiet", onclick: close }, "close")),
    shown);
  const open = async (row) => {
    const found = await act("event", { row });
    if (found == null) return;
    whole = found;
    set(shown, whole.length > MOST_SHOWN ? whole.slice(0, MOST_SHOWN) + "\n… copy it to see the rest" : whole);
    detail.hidden = false;
  };

  // The rows: those that can be seen are in the page, in the middle of the space that all of them would take.
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
    const kind = h("button", { class: "quiet", onclick: () => open(id) });
    const who = h("td");
    const what = h("bdi", { dir: "ltr" });
    const row = h("tr", {}, time, h("td", {}, kind), who, h("td", {}, what));
    return [row, (now) => {
      row.className = `${now.tone} ${now.mark ? "mark" : now.grows ? "grows" : ""}`;
      row.ariaRowIndex = now.number + 2;
      set(time, now.at ? new Date(now.at).toLocaleTimeString([], CLOCK) : "");
      set(kind, now.batches > 1 ? `${now.kind} ×${now.batches}` : now.kind);
      kind.hidden = !now.at;
      set(who, names.get(now.session) ?? now.session);
      set(what, now.text);
    }];
  });

  let known = new Map();
  let counting, base = 0, total = 0, asking = false, moved = false, askedAt = -PATIENCE, timer;
  let ours;
  const scrollTo = (top) => {
    scroller.scrollTop = top;
    ours = scroller.scrollTop;
  };
  const take = (part) => {
    if (part.counting !== counting) {
      known.clear();
      counting = part.counting;
      base = part.base;
      follow.checked = true;
    }
    // Those that are looked at stay where they are.
    if (!follow.checked && part.base > base) scrollTo(scroller.scrollTop - (part.base - base) * ROW);
    ({ base, total } = part);
    part.rows.forEach((row, at) => known.set(part.first + at, row));
  };
  const look = async (first, byHand) => {
    clearTimeout(timer);
    const wait = byHand ? 0 : askedAt + PATIENCE - performance.now();
    if (asking) return;
    if (wait > 0) {
      timer = setTimeout(draw, wait);
      return;
    }
    asking = true;
    moved = false;
    askedAt = performance.now();
    try {
      const part = await ask(model, "rows", { first, count: 100 });
      if (part.counting === counting) take(part);
    } catch (error) {
      say(error.message);
    }
    asking = false;
    draw(moved);
  };
  const draw = (byHand = false) => {
    const room = scroller.clientHeight;
    const top = follow.checked ? total * ROW - room : Math.min(scroller.scrollTop, total * ROW);
    const from = Math.max(0, Math.floor(top / ROW) - AROUND);
    const to = Math.min(total, Math.ceil((top + room) / ROW) + AROUND);
    const seen = [];
    for (let number = from; number < to; number++)
      seen.push({ ...(known.get(base + number) ?? { id: "missing" + number, kind: "", text: "…" }), number });
    const held = body.contains(document.activeElement);
    above.firstChild.firstChild.style.height = from * ROW + "px";
    below.firstChild.firstChild.style.height = (total - to) * ROW + "px";
    table.setAttribute("aria-rowcount", total + 1);
    showRows(seen);
    if (held && !body.contains(document.activeElement)) scroller.focus({ preventScroll: true });
    if (follow.checked) scrollTo(scroller.scrollHeight);
    for (const at of known.keys()) if (at < base + from - 100 || at >= base + to + 100) known.delete(at);
    const missing = seen.find(({ at }) => !at);
    if (missing) look(Math.max(base, base + missing.number - AROUND), byHand);
  };
  scroller.onscroll = () => {
    if (scroller.scrollTop === ours) return;
    ours = null;
    follow.checked = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < ROW;
    moved = true;
    draw(true);
  };
  const sizes = new ResizeObserver(() => draw());
  sizes.observe(scroller);

  const count = h("span", { class: "dim grow" });
  root.classList.add("events");
  root.append(
    h("div", { class: "row" }, pill, place, again), problem, strip, news, waiting,
    h("div", { class: "row" }, session, search, h("label", {}, follow, " follow")),
    h("div", { class: "row", role: "group", "aria-label": "kinds of events" },
      ...boxes.map(([group, box]) => h("label", {}, box, " " + group))),
    one, scroller, detail,
    h("div", { class: "row" }, count, copyButton(() => CODE, "code for a DataFrame", "as DataFrame"),
      h("button", { class: "quiet", onclick: () => act("clear") }, "clear")));

  watch(["connection"], () => {
    const { state, words: said, place: where, error } = get("connection");
    pill.className = "pill " + (GOOD[state] ?? "");
    set(pill, said);
    set(place, where);
    set(problem, error);
    problem.hidden = !error;
    again.hidden = state !== "closed";
  });
  watch(["permissions"], () => {
    const asked = get("permissions");
    const held = waiting.contains(document.activeElement);
    showWaiting(asked);
    set(news, asked.length ? asked.map(({ tool, session: where }) => `${tool} in ${where}`).join(", ") + " waits for a decision" : "");
    // Not to the next call's button: a second Enter would decide about what nobody has read.
    if (held && !waiting.contains(document.activeElement)) scroller.focus({ preventScroll: true });
  });
  watch(["sessions", "filter"], () => {
    const { session: id, groups, text: needle } = get("filter");
    const all = get("sessions");
    names = new Map(all.map((each) => [each.id, each.name]));
    const rest = id && !names.has(id) ? [{ id, name: id }] : [];
    showSessions([{ id: "", name: "all sessions" }, ...rest, ...all]);
    session.value = id;
    for (const [group, box] of boxes) box.checked = groups.includes(group);
    if (!search.matches(":focus")) search.value = needle;
    one.hidden = !id;
  });
  watch(["live"], () => {
    const live = get("live");
    const ends = words.scrollHeight - words.scrollTop - words.clientHeight < 9;
    const busy = /running|waiting|queued/.test(live.status);
    set(status, live.status ?? "nothing was heard of this session yet");
    status.className = "pill " + (live.status === "waiting" ? "warn" : busy ? "good" : "");
    set(remark, live.remark ?? "");
    stop.hidden = !busy;
    write(thoughts, live.thoughts ?? "");
    write(text, live.text ?? "");
    fold.hidden = !live.thoughts;
    words.hidden = !live.thoughts && !live.text;
    if (ends) words.scrollTop = words.scrollHeight;
  });
  watch(["frame"], () => {
    take(get("frame"));
    set(count, get("frame").summary);
    draw();
  });
  return () => {
    sizes.disconnect();
    clearTimeout(timer);
    clearTimeout(typing);
  };
});
