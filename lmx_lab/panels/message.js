// A message of a conversation, in the chat panel and on the chat page.

/** Return a function that shows a growing text without formatting, in pieces. */
const plain = (parent) => (text) => patchChildren(parent, 0, split(text).map((piece) => h("span", {}, piece)));

/**
 * Create a message.
 * @param {{role: string}} item "user" or "assistant".
 * @param {Element[]} buttons Elements beside the button that copies the text.
 * @param {Element[]} more Elements below the text.
 * @returns {[Element, (now: {text: string, reasoning: string, stats: string, error: string}) => void]} The element, and
 *   the function that updates it.
 */
const messageView = ({ role }, buttons, more = []) => {
  const isUser = role === "user";
  const text = h("div", { class: "text" });
  const thoughts = h("div", { class: "text plain dim" });
  const fold = h("details", { class: "thoughts" }, h("summary", {}, "thoughts"), thoughts);
  const stats = h("span", { class: "dim" });
  const error = h("div", { class: "error" });
  let shown = {};
  const showText = (isUser ? plain : markdown)(text), showThoughts = plain(thoughts);
  if (isUser) text.classList.add("plain");
  const copy = copyButton(() => shown.text, "answer");
  const row = h("div", { class: "row" }, stats, ...(isUser ? [] : [copy]), ...buttons);
  const node = h("div", { class: role }, h("b", {}, isUser ? "You" : "Model"), fold, text, ...more, error, row);
  return [node, (now) => {
    shown = now;
    showText(now.text);
    showThoughts(now.reasoning);
    fold.hidden = !now.reasoning;
    set(stats, now.stats);
    set(error, now.error);
    copy.hidden = !now.text;
  }];
};
