// Conversations as files. The chat panel reads the same format.

const FILE_VERSION = 1;
const FORMAT = "lmx-lab-conversations";
const ROLES = ["user", "assistant", "tool", "system"];
// The server accepts 4,096 messages in a request.
const MAX_MESSAGES = 4000;

/** Return the content of a message for the model: its text, and each attached file as another part. */
const contentOf = ({ text, files }) =>
  files?.length
    ? [text, ...files.map((file) => "File " + file.name + ":\n" + file.text)].map((part) => ({ type: "text", text: part }))
    : text;

/**
 * Convert messages to the chat format: the system prompt and the latest messages. Questions without an answer are
 * omitted, except for the last one.
 */
const toChatMessages = ({ system, messages }) => {
  const prompt = system.trim() ? [{ role: "system", content: system }] : [];
  const latest = messages
    .filter(({ role, text, calls }, at) => {
      if (role !== "user") return role === "tool" || text || calls?.length;
      do at++;
      while (messages[at]?.role === "system");
      const next = messages[at];
      return !next || (next.role === "assistant" && (next.text || next.calls?.length));
    })
    .map((message) => ({
      role: message.role,
      content: contentOf(message),
      ...(message.calls?.length ? { tool_calls: message.calls } : {}),
      ...(message.role === "tool" ? { tool_call_id: message.call } : {}),
    }));
  return [...prompt, ...latest.slice(prompt.length - MAX_MESSAGES)];
};

const toFile = (chat) => ({
  format: FORMAT,
  version: FILE_VERSION,
  title: chat.title,
  sampling: chat.sampling,
  messages: [
    ...(chat.system.trim() ? [{ role: "system", content: chat.system }] : []),
    ...chat.messages.map((message) => ({
      role: message.role,
      content: contentOf(message),
      ...Object.fromEntries([
        ["reasoning_content", message.reasoning], ["stats", message.stats], ["error", message.error],
        ["tool_calls", message.calls?.length ? message.calls : null], ["tool_call_id", message.call],
      ].filter(([, value]) => value)),
    })),
  ],
});

const NEXT_STEP = "Choose a file that was saved by this page or by the chat panel, or a JSON list of chat messages.";
const wrong = (problem) => Error(problem + ". " + NEXT_STEP);
const asText = (value, name) => {
  if (value == null) return "";
  if (typeof value !== "string") throw wrong(name + " must be a text");
  return value;
};

/**
 * Convert a message of a file. The parts of its content after the first one are attached files. In a system message,
 * which has no files, all parts are its text.
 */
const fromMessage = (message, number) => {
  const subject = "Message " + number + " of the file", name = "Each field of message " + number;
  if (!ROLES.includes(message?.role)) throw wrong(subject + " has no role; it must be user, assistant, tool or system");
  const parts = Array.isArray(message.content) ? message.content.map((part) => asText(part?.text, name)) : [asText(message.content, name)];
  const [text = "", ...files] = message.role === "system" ? [parts.join("")] : parts;
  const calls = (Array.isArray(message.tool_calls) ? message.tool_calls : []).map((call) => ({
    id: asText(call?.id, name), type: "function",
    function: { name: asText(call?.function?.name, name), arguments: asText(call?.function?.arguments, name) },
  }));
  return {
    id: newId(), role: message.role, text, reasoning: asText(message.reasoning_content, name),
    stats: asText(message.stats, name), error: asText(message.error, name),
    ...(message.role === "tool" ? { call: asText(message.tool_call_id, name) } : {}),
    ...(calls.length ? { calls } : {}),
    ...(files.length ? { files: files.map((file) => {
      const found = /^File (.*):\n/.exec(file);
      return { name: found?.[1] ?? "attachment", text: found ? file.slice(found[0].length) : file };
    }) } : {}),
  };
};

const fromConversation = (data) => {
  const messages = Array.isArray(data) ? data : data?.messages;
  if (!Array.isArray(messages) || !messages.length) throw wrong("The file has no messages");
  const read = messages.map(fromMessage);
  const system = read[0].role === "system" ? read.shift().text : "";
  if (!read.length) throw wrong("The file has only a system prompt");
  const sampling = {};
  for (const [name] of SAMPLING) if (Number.isFinite(data.sampling?.[name])) sampling[name] = data.sampling[name];
  const title = asText(data.title, "The title") || titleOf(read);
  return { ...newChat(), title: title.slice(0, 200), sampling, system, messages: read };
};

/** Read the conversations of a file. Throws an Error whose message can be displayed. */
const fromFile = (text) => {
  let data;
  try {
    data = JSON.parse(text);
  } catch {
    throw wrong("The file is not JSON");
  }
  if (data?.version !== undefined && data.version !== FILE_VERSION)
    throw Error("The file has version " + data.version + ", and this page reads version " + FILE_VERSION +
      ". Open it with the version of LMX Lab that saved it.");
  const found = Array.isArray(data?.conversations) ? data.conversations : [data];
  if (!found.length) throw wrong("The file has no conversations");
  return found.map(fromConversation);
};
