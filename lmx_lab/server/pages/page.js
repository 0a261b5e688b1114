// The chat page of the server. Conversations are stored in this browser only, and not on the server.

// The name, step, default, minimum and maximum of each parameter.
const SAMPLING = [
  ["temperature", 0.1, "0.7", 0, 2], ["top_p", 0.05, "1", 0, 1], ["max_tokens", 1, "4096", 1, 1e9],
  ["seed", 1, "random", 0, Number.MAX_SAFE_INTEGER],
];
const MAX_FILE_CHARACTERS = 1e6;
const MAX_IMPORT_BYTES = 1e8;
const FIRST_SHOWN = 30;
// Messages are grouped in blocks of this many. The layout skips blocks outside of the view as a whole.
const BLOCK_MESSAGES = 50;
// The text of a running answer is stored this often, in case the browser discards the page.
const SAVE_MS = 3000;
const PAINT_MS = 40;
const PAINT_SHARE = 4;

const titleOf = (messages) => messages.find(({ role }) => role === "user")?.text.trim().slice(0, 80) || "New conversation";
/** Create a conversation with the settings of another one. */
const newChat = (like = {}) => ({
  id: newId(), title: "", updated: Date.now(), revision: null, system: like.system ?? "", sampling: { ...like.sampling },
  model: like.model ?? "", messages: [],
});

let chat = newChat();
/** The answers that are being generated, by the id of their conversation. */
const answers = new Map();
let server = {};
let edited = null;
let attached = [];
/** What was written before the user edited an earlier question. */
let draft = {};

// Notes

const notes = h("div", { class: "notes", role: "status" });
/** Display a note that replaces the previous one of the same name; no text removes it. */
const note = (name, text, ...buttons) => {
  let node = [...notes.children].find((each) => each.dataset.name === name);
  if (node?.firstChild.textContent === text) return;
  node?.remove();
  if (text) notes.append(h("p", { class: "note row", "data-name": name }, h("span", { class: "grow" }, text), ...buttons));
};
const dismissed = (name, text) => note(name, text, h("button", { class: "quiet", onclick: () => note(name, "") }, "dismiss"));
const failed = (error) => dismissed("error", error.message);

// Messages

const list = h("div");
const hint = h("p", { class: "dim" }, "No messages yet. Conversations are stored in this browser only.");
const log = h("div", { class: "scroll log grow", role: "log", "aria-label": "conversation", tabIndex: 0 }, hint, list);
const views = new Map();
let loading = 0;

// The end stays in view until the user scrolls up. The height of messages outside of the view is only estimated, so it
// may change although the text does not.
let isFollowing = true, ownTop = 0;
const scrollTo = (top) => {
  log.scrollTop = top;
  ownTop = log.scrollTop;
};
const scrollToEnd = () => {
  isFollowing = true;
  scrollTo(log.scrollHeight);
};
log.onscroll = () => {
  const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  if (isAtEnd || log.scrollTop !== ownTop) isFollowing = isAtEnd;
};
new ResizeObserver(() => isFollowing && scrollToEnd()).observe(list);

const collapsed = (name, text) => {
  const content = h("div", { class: "text plain" });
  plain(content)(text);
  return h("details", {}, h("summary", {}, name), content);
};

/** Create the view of a message, with its attached files and tool calls collapsed. */
const viewOf = (message) => {
  const { role, text } = message;
  if (role === "tool" || role === "system")
    return [h("div", { class: role }, collapsed(role === "tool" ? "tool result" : "system message", text)), () => 0];
  const button = role === "user"
    ? h("button", { class: "quiet", title: "change this question and send it again", onclick: () => edit(message) }, "edit")
    : h("button", { class: "quiet again", title: "replace this answer with another one", onclick: () => again(message) }, "try again");
  const more = h("div");
  let shown = "";
  const [node, show] = messageView(message, [button], [more]);
  return [node, () => {
    show(message);
    const extra = JSON.stringify([message.files, message.calls]);
    if (extra !== shown)
      more.replaceChildren(
        ...(message.files ?? []).map((file) => collapsed("file " + file.name, file.text)),
        ...(message.calls ?? []).map(({ function: call }) => collapsed("tool call: " + call.name, call.arguments)));
    shown = extra;
    node.ariaCurrent = message.id === edited ? "true" : null;
  }];
};

/** Show the message at a position, after or before all others that are shown. */
const add = (at, isFirst = false) => {
  const message = chat.messages[at], [node, show] = viewOf(message);
  views.set(message.id, [node, show]);
  show();
  let block = isFirst ? list.firstChild : list.lastChild;
  const number = String(Math.floor(at / BLOCK_MESSAGES));
  if (block?.dataset.number !== number) {
    block = h("div", { class: "block", "data-number": number });
    isFirst ? list.prepend(block) : list.append(block);
  }
  isFirst ? block.prepend(node) : block.append(node);
};

/** Show the messages of the conversation: the last ones immediately, and the others in later tasks. */
const showMessages = () => {
  const { messages } = chat, now = ++loading;
  views.clear();
  list.replaceChildren();
  let left = Math.max(0, messages.length - FIRST_SHOWN);
  for (let at = left; at < messages.length; at++) add(at);
  scrollToEnd();
  const more = () => {
    if (now !== loading || !left) return;
    const fromEnd = log.scrollHeight - log.scrollTop, began = performance.now();
    while (left && performance.now() - began < 8) add(--left, true);
    isFollowing ? scrollToEnd() : scrollTo(log.scrollHeight - fromEnd);
    setTimeout(more, 16);
  };
  setTimeout(more, 16);
};

// Conversations

const chats = h("ul", { class: "chats" });
const showList = async () => {
  const heads = await store.list().catch(() => []);
  chats.replaceChildren(...heads.map(({ id, title }) => {
    const button = h("button", { class: "quiet", onclick: () => (sideDrawer.close(), open(id)) }, title);
    if (id === chat.id) button.setAttribute("aria-current", "true");
    return h("li", {}, button);
  }));
};

let saving = Promise.resolve();
const save = (target = chat) => (saving = saving.then(async () => {
  if (!target.messages.length) return;
  target.updated = Date.now();
  target.title ||= titleOf(target.messages);
  const id = target.id;
  try {
    const isCopy = await store.save(target);
    note("storage", "");
    if (isCopy) {
      if (answers.has(id)) answers.set(target.id, answers.get(id)), answers.delete(id);
      dismissed("tabs", "Another tab has changed this conversation. This tab continues in a copy.");
    }
    if (target === chat) kept.set("chat", target.id);
  } catch (error) {
    const isFull = error?.name === "QuotaExceededError";
    note("storage", (isFull ? "The storage of this browser is full" : "This browser does not store conversations") +
      ". This conversation is lost when the page is closed. " + (isFull ? "Save and delete other conversations." : "Save it as a file."));
  }
  await showList();
}));

const show = (next) => {
  chat = next;
  // The draft of a message is kept, because a change in another tab can call this at any time.
  if (edited != null && !chat.messages.some(({ id }) => id === edited)) edit(null);
  for (const [name, input] of inputs) input.value = chat.sampling[name] ?? "";
  set(samplingError, "");
  system.value = chat.system;
  model.value = [...model.options].some(({ value }) => value === chat.model) ? chat.model : "";
  showMessages();
  update();
  return showList();
};
const open = async (id) => {
  const running = answers.get(id);
  const next = running ? running.chat : await store.load(id).catch(() => null);
  if (!next) return showList();
  kept.set("chat", id);
  return show(next);
};
const create = () => {
  sideDrawer.close();
  box.focus();
  return show(newChat(chat));
};
const remove = async () => {
  if (!confirm("Delete the conversation “" + (chat.title || "New conversation") + "” from this browser?")) return;
  const { id } = chat;
  answers.get(id)?.controller.abort();
  // A conversation without messages is not stored, so that the end of its answer does not store it again.
  chat.messages = [];
  await saving;
  await store.remove(id).catch(failed);
  settings.close();
  await show(newChat(chat));
};

if (changes) changes.onmessage = async ({ data: id }) => {
  if (id === chat.id && !answers.has(id)) {
    await saving;
    const stored = await store.load(id).catch(() => null);
    if (stored && stored.revision !== chat.revision && id === chat.id && !answers.has(id)) return show(stored);
  }
  await showList();
};

// Files

const download = (file) => {
  const href = URL.createObjectURL(file);
  h("a", { href, download: file.name }).click();
  setTimeout(() => URL.revokeObjectURL(href), 60000);
};
const fileOf = (value, name) =>
  new File([JSON.stringify(value, null, 1) + "\n"], name + "-" + new Date().toISOString().slice(0, 10) + ".json", { type: "application/json" });
const saveFile = () => download(fileOf(toFile(chat), "chat"));
const saveAll = async () => {
  const all = [];
  for (const { id } of await store.list().catch(() => [])) all.push(toFile((await store.load(id)) ?? newChat()));
  if (!all.length) return dismissed("error", "There are no conversations to save.");
  download(fileOf({ format: FORMAT, version: FILE_VERSION, conversations: all }, "chats"));
};
const shareFile = () => navigator.share({ files: [fileOf(toFile(chat), "chat")], title: chat.title }).catch(() => 0);

/** Create a button that lets the user choose files. The input is not in the document: Chromium opens no chooser from a modal dialog. */
const picker = (name, title, accept, use) => {
  const input = h("input", { type: "file", accept, multiple: true, onchange: async () => {
    for (const file of [...input.files]) await use(file).catch(failed);
    input.value = "";
  } });
  return h("button", { title, onclick: () => input.click() }, name);
};
const importFile = async (file) => {
  // Closed even if the file cannot be read, so that the note is visible.
  sideDrawer.close();
  note("error", "");
  if (file.size > MAX_IMPORT_BYTES) throw Error(file.name + " has " + file.size + " bytes; the limit is " + MAX_IMPORT_BYTES + ".");
  const found = fromFile(await file.text());
  for (const each of found) await save(each);
  await open(found[0].id);
};
const attach = async (file) => {
  note("error", "");
  if (file.size > 4 * MAX_FILE_CHARACTERS) throw Error(file.name + " is too long: it has " + file.size + " bytes; the limit is " + MAX_FILE_CHARACTERS + " characters.");
  let text;
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    if (text.includes("\0")) throw Error();
  } catch {
    throw Error(file.name + " is not a text file in UTF-8. Attach a text file, such as notes, code or CSV.");
  }
  if (text.length > MAX_FILE_CHARACTERS) throw Error(file.name + " has " + text.length + " characters; the limit is " + MAX_FILE_CHARACTERS + ".");
  attached.push({ name: file.name.replace(/\s+/g, " "), text });
  showAttached();
};
const chips = h("div", { class: "row" });
const showAttached = () => chips.replaceChildren(...attached.map((file) =>
  h("span", { class: "pill" }, file.name, h("button", { class: "quiet", "aria-label": "remove " + file.name, onclick: () => {
    attached = attached.filter((each) => each !== file);
    showAttached();
    box.focus();
  } }, "remove"))));

// Answers

const paint = (answer) => {
  answer.painting = false;
  if (answer.chat !== chat || !views.has(answer.message.id)) return;
  const began = performance.now();
  views.get(answer.message.id)[1]();
  if (busy() === answer) set(status, answer.status());
  if (isFollowing) scrollToEnd();
  // Limits the share of its time that a slow device spends on this.
  answer.pause = Math.max(PAINT_MS, PAINT_SHARE * (performance.now() - began));
};
const paintSoon = (answer) => {
  if (answer.painting) return;
  answer.painting = true;
  setTimeout(() => requestAnimationFrame(() => paint(answer)), answer.pause);
};

const seconds = (ms) => (ms / 1000).toFixed(2) + " s";
const endings = (reason, limit, count) =>
  ({ stop: "", length: count >= (limit ?? 4096) ? "cut at max_tokens" : "cut: the model's context is full", tool_calls: "requests a tool" }[reason] ?? reason);

/** Add the parts of tool calls in a chunk to the calls of a message. */
const addCalls = (message, parts) => {
  for (const { index, id, function: part } of parts) {
    const call = ((message.calls ??= [])[index] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
    if (id) call.id = id;
    call.function.name += part?.name ?? "";
    call.function.arguments += part?.arguments ?? "";
  }
};

/** Generate the answer to the last message of a conversation. */
const generate = async (target) => {
  const message = { id: newId(), role: "assistant", text: "", reasoning: "", stats: "", error: "" };
  const began = performance.now();
  let first = null, chunks = 0, end = {};
  const answer = {
    chat: target, message, controller: new AbortController(), pause: PAINT_MS, painting: false,
    status: () => first === null ? "waiting for the model" : "about " + (chunks / Math.max((performance.now() - first) / 1000, 0.1)).toFixed(0) + " tok/s",
  };
  const body = { model: target.model || "default", messages: toChatMessages(target), ...target.sampling };
  target.messages.push(message);
  answers.set(target.id, answer);
  if (target === chat) {
    add(target.messages.length - 1);
    update();
    scrollToEnd();
  }
  save(target);
  const timer = setInterval(() => save(target), SAVE_MS);
  try {
    await streamAnswer(body, answer.controller.signal, ({ model: name, choices: [choice], usage, timings }) => {
      const delta = choice?.delta ?? {};
      if (delta.content || delta.reasoning_content || delta.tool_calls) {
        first ??= performance.now();
        chunks++;
        message.text += delta.content ?? "";
        message.reasoning += delta.reasoning_content ?? "";
        if (delta.tool_calls) addCalls(message, delta.tool_calls);
      }
      end = { ...end, name, ...(usage ? { usage } : {}), ...(timings ? { timings } : {}), ...(choice?.finish_reason ? { reason: choice.finish_reason } : {}) };
      paintSoon(answer);
    });
    const count = end.usage?.completion_tokens ?? chunks;
    message.stats = [
      end.name, count + " tokens · " + (end.timings?.predicted_per_second ?? 0).toFixed(1) + " tok/s",
      first === null ? "" : "first token in " + seconds(first - began), endings(end.reason, target.sampling.max_tokens, count),
    ].filter(Boolean).join(" · ");
  } catch (error) {
    if (error.name === "AbortError") message.stats = "stopped";
    else {
      message.error = error.message;
      // The reason in the note is written for visitors, and that in the error for programs.
      if (error.status === 503) await poll().then(() => (message.error = server.error?.message ?? error.message));
    }
    if (error.status === 401) askKey(error.message);
    if (error.status === 0) poll();
  }
  clearInterval(timer);
  answers.delete(target.id);
  paint(answer);
  if (target === chat) update();
  await save(target);
};

/** Remove the message at this position and all later ones. */
const cut = (at) => {
  for (const { id } of chat.messages.splice(at)) {
    views.get(id)?.[0].remove();
    views.delete(id);
  }
  while (list.lastChild && !list.lastChild.firstChild) list.lastChild.remove();
};
const busy = () => answers.get(chat.id);
const again = (message) => {
  if (busy()) return;
  cut(chat.messages.indexOf(message));
  generate(chat);
};
const send = () => {
  const text = box.value;
  if (!(text.trim() || attached.length)) return;
  if (busy()) return note("busy", "The message was not sent, because an answer is being generated. Escape stops the answer.");
  const at = chat.messages.findIndex(({ id }) => id === edited);
  if (at >= 0) cut(at);
  const message = { id: newId(), role: "user", text, reasoning: "", stats: "", error: "", ...(attached.length ? { files: attached } : {}) };
  chat.messages.push(message);
  add(chat.messages.length - 1);
  edit(null);
  generate(chat);
};
const stop = () => busy()?.controller.abort();
const edit = (message) => {
  const before = edited;
  if (message && before == null) draft = { text: box.value, files: attached };
  edited = message?.id ?? null;
  const { text = "", files = [] } = message ?? (before == null ? {} : draft);
  attached = [...files];
  box.value = text;
  for (const id of [before, edited]) views.get(id)?.[1]();
  showAttached();
  if (message) box.focus();
  update();
};

// Key

const keyInput = h("input", { type: "password", autocomplete: "current-password", required: true, "aria-label": "key" });
const keyError = h("p", { class: "error", role: "alert" });
const keyForm = h("dialog", { class: "lmx", "aria-label": "API key of the server" },
  h("form", { method: "dialog", onsubmit: async (event) => {
    event.preventDefault();
    try {
      const key = keyInput.value.trim();
      // No key of a server has other characters, and fetch() fails if a header has them.
      if (!/^[!-~]+$/.test(key)) throw { status: 401 };
      kept.set("key", key);
      await getJson("v1/models");
      keyForm.close();
      box.focus();
      loadModels();
    } catch (error) {
      set(keyError, error.status === 401 ? "The key is wrong. Ask the operator of this server for the right one." : error.message);
      keyInput.select();
    }
  } },
  h("p", {}, "This server requires an API key. The key is stored in this browser."), keyError,
  h("div", { class: "row" }, keyInput, h("button", { class: "go" }, "Use the key"))));
const askKey = (message) => {
  set(keyError, kept.get("key") ? message : "");
  keyInput.value = "";
  if (!keyForm.open) keyForm.showModal();
};

// State of the server

const model = h("select", { "aria-label": "model", hidden: true, onchange: () => {
  chat.model = model.value;
  save();
} });
const name = h("b", { class: "name" });
const loadModels = async () => {
  try {
    const { models } = await getJson("admin/models");
    const ids = models.filter(({ kind, problem }) => kind === "chat" && !problem).map(({ id }) => id);
    model.replaceChildren(h("option", { value: "" }, server.model ? "loaded: " + server.model : "the loaded model"), ...ids.map((id) => h("option", { value: id }, id)));
    model.value = ids.includes(chat.model) ? chat.model : "";
    model.hidden = !server.swap || ids.length < 2;
    name.hidden = !model.hidden;
  } catch (error) {
    if (error.status === 401) askKey(error.message);
  }
};
let timer = 0;
const poll = async () => {
  clearTimeout(timer);
  const before = server;
  try {
    server = { ...(await getJson("readyz").catch((error) => error.body ?? Promise.reject(error))), isReachable: true };
    note("connection", "");
  } catch (error) {
    server = { ...before, isReachable: false };
    note("connection", error.status ? error.message : UNREACHABLE);
  }
  const { isReachable, ready, swap, recorded, error } = server;
  note("model", isReachable && !ready ? "No model is ready: " + (error?.message ?? "load one first") + "." + (swap ? " A question loads the selected model." : "") : "");
  note("recorded", recorded ? "This server records all requests, including your questions and the answers." : "");
  set(name, server.model || "no model");
  name.title = server.model ?? "";
  if (isReachable && (!before.isReachable || before.model !== server.model || before.swap !== swap)) loadModels();
  if (!document.hidden) timer = setTimeout(poll, POLL_MS);
};

// The page

const box = h("textarea", {
  rows: 2, "aria-label": "message", placeholder: "Ask something",
  onkeydown: (event) => {
    if (event.key === "Escape") busy() ? stop() : edited != null && edit(null);
    // On a phone, Enter inserts a new line. In Safari, the Enter key that ends a composition has the code 229.
    if (event.key !== "Enter" || event.shiftKey || event.isComposing || event.keyCode === 229 || matchMedia("(pointer: coarse)").matches) return;
    event.preventDefault();
    event.repeat || send();
  },
});
const editing = h("p", { class: "row" },
  h("span", { class: "grow" }, "Sending replaces the marked question and removes what follows it."),
  h("button", { class: "quiet", onclick: () => edit(null) }, "Cancel editing"));
const status = h("span", { class: "dim grow", role: "status" });
const go = h("button", { class: "go", onclick: () => (busy() ? stop() : send()) }, "Send");

const samplingError = h("p", { class: "error", role: "alert" });
const inputs = SAMPLING.map(([name, step, placeholder, min, max]) => [name, h("input", {
  type: "number", min, max, step, placeholder,
  // An input that is not a number changes the value from one empty text to another, which is not an event.
  onblur: ({ target }) => target.validity.badInput && target.onchange({ target }),
  onchange: ({ target }) => {
    const value = +target.value, isWhole = step === 1;
    // The browser returns an empty text for an input such as 1e999.
    const isEmpty = target.value === "" && !target.validity.badInput;
    const isValid = target.value !== "" && value >= min && value <= max && (!isWhole || Number.isInteger(value));
    if (isEmpty) delete chat.sampling[name];
    else if (isValid) chat.sampling[name] = value;
    else target.value = chat.sampling[name] ?? "";
    set(samplingError, isEmpty || isValid ? "" : name + " must be a " + (isWhole ? "whole " : "") + "number from " + min + " to " + max + ". The input was not used.");
    save();
  },
})]);
const system = h("textarea", { rows: 4, onchange: () => {
  chat.system = system.value;
  save();
} });
const labelled = (name, input) => h("label", {}, name, input);
const drawer = (label, ...children) => {
  const node = h("dialog", { class: "lmx drawer", "aria-label": label, onclick: ({ target }) => target === node && node.close() },
    h("div", { class: "inner" }, h("div", { class: "row head" }, h("h2", { class: "grow" }, label), h("button", { onclick: () => node.close() }, "Close")), ...children));
  return node;
};
const settings = drawer("Settings",
  labelled("system prompt", system), h("div", { class: "row" }, ...inputs.map(([name, input]) => labelled(name, input))), samplingError,
  h("p", { class: "dim" }, "For empty fields, the server's defaults are used. The settings apply to this conversation; a new one starts with a copy of them."),
  h("div", { class: "row" }, h("button", { title: "save this conversation as a file", onclick: saveFile }, "Save"),
    h("button", { title: "share this conversation as a file", hidden: !navigator.canShare?.({ files: [fileOf({}, "chat")] }), onclick: shareFile }, "Share"),
    h("button", { onclick: remove }, "Delete this conversation")),
  h("p", {}, h("a", { href: "about" }, "About this server")));
const side = h("nav", { "aria-label": "conversations" },
  h("div", { class: "row" }, h("button", { class: "go", onclick: create }, "New conversation")), chats,
  h("div", { class: "row" }, picker("Import", "load conversations from a file", ".json,application/json", importFile),
    h("button", { title: "save all conversations as a file", onclick: saveAll }, "Save all")));
const sideDrawer = drawer("Conversations");
const openSide = h("button", { onclick: () => sideDrawer.showModal() }, "Conversations");

const update = () => {
  const answer = busy();
  answer || note("busy", "");
  editing.hidden = edited == null;
  hint.hidden = chat.messages.length;
  list.ariaBusy = !!answer;
  set(status, answer?.status() ?? "");
  set(go, answer ? "Stop" : "Send");
};

const root = h("div", { class: "lmx chat page" },
  h("header", { class: "row" }, openSide, h("h1", { class: "hidden" }, "LMX Lab chat"), name, model, h("span", { class: "grow" }),
    h("button", { onclick: () => settings.showModal() }, "Settings")),
  h("main", {}, notes, log, editing, chips, box,
    h("div", { class: "row" }, picker("Attach", "attach a text file to the message", "", attach), status, go)),
  settings, sideDrawer, keyForm);
document.body.append(root);

// On a wide screen, the list of conversations is beside the messages; otherwise it is in a drawer.
const wide = matchMedia("(min-width: 900px)");
const arrange = () => {
  sideDrawer.close();
  openSide.hidden = wide.matches;
  wide.matches ? root.prepend(side) : sideDrawer.firstChild.append(side);
};
wide.onchange = arrange;
arrange();
addEventListener("online", poll);
document.addEventListener("visibilitychange", () => {
  document.hidden ? answers.forEach(({ chat: target }) => save(target)) : poll();
});
update();
poll();
showList();
if (kept.get("chat")) open(kept.get("chat"));
wide.matches && box.focus();
