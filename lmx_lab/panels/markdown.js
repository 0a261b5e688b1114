// Shows the text of a model, which is usually Markdown. Elements are created one by one, so HTML in the text is shown as
// text. Only links to web and mail addresses can be followed, and images are shown as links.

// A browser lays out a whole paragraph again when it grows, so long ones are split into pieces of about this size.
const PIECE = 1500;
const MAX_PIECE = 3 * PIECE;
const MAX_DEPTH = 8;
// A growing list is parsed again as a whole, so a long one is split into lists of this many items.
const MAX_ITEMS = 50;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?: +|$)(.*)$/;
const FENCE = /^ {0,3}(`{3,}(?=[^`]*$)|~{3,})\s*([^\s`]*)/;
const HEADING = /^ {0,3}(#{1,6})(?: (.*))?$/;
const RULE = /^ {0,3}([-*_])(?: *\1){2,} *$/;
const QUOTE = /^ {0,3}> ?/;
const DIVIDER = /^[ |:-]+$/;
// Each part takes time that is linear in the length of the text, whatever the text is.
const INLINE =
  /\\([!-/:-@[-`{-~])|(`{1,9})(?!`)([^]*?[^`])\2(?!`)|(\*\*|__|~~)(?=\S)([^]*?\S)\4|([*_])(?=\S)([^]*?\S)\6|!?\[([^\]\n]*)\]\(\s*<?([^\s)>]*)>?(?:\s[^)\n]*)?\)|(https?:\/\/[^\s<>"'`)\]]*[^\s<>"'`)\].,:;!?])/g;

/** Split a text after line ends or spaces. While the text grows, all pieces except the last one stay the same. */
const split = (text) => {
  const found = [];
  for (let start = 0; start < text.length;) {
    let end = text.indexOf("\n", start + PIECE) + 1;
    if (!end || end > start + 2 * PIECE) end = text.indexOf(" ", start + 2 * PIECE) + 1;
    if (!end || end > start + MAX_PIECE) end = start + MAX_PIECE;
    // Do not split a surrogate pair.
    if (/[\uD800-\uDBFF]/.test(text[end - 1])) end++;
    found.push(text.slice(start, end));
    start = end;
  }
  return found;
};

/** Return nodes for the inline parts of a text: emphasis, code and links. */
const inline = (text, depth = 0) => {
  const nodes = [];
  let shown = 0;
  INLINE.lastIndex = 0;
  const add = (end, node) => (end > shown && nodes.push(text.slice(shown, end)), node && nodes.push(node));
  for (let match; depth < MAX_DEPTH && text.length <= MAX_PIECE + 1 && (match = INLINE.exec(text));) {
    const [all, escaped, , code, strong, bold, mark, italic, label, target, address] = match;
    const at = match.index, next = at + all.length;
    const isInWord = (strong ?? mark)?.[0] === "_" && (/\w/.test(text[at - 1] ?? "") || /\w/.test(text[next] ?? ""));
    let node = null;
    if (escaped) node = escaped;
    else if (code != null) node = h("code", {}, /^ .*\S.* $/.test(code) ? code.slice(1, -1) : code);
    else if (strong && !isInWord) node = h(strong === "~~" ? "del" : "strong", {}, ...inline(bold, depth + 1));
    else if (mark && !isInWord) node = h("em", {}, ...inline(italic, depth + 1));
    else if (address || /^(https?:\/\/|mailto:)/i.test(target ?? ""))
      node = h("a", { href: address ?? target, target: "_blank", rel: "noopener noreferrer" }, address ?? (label || target));
    // The recursive calls above have changed the position in the shared expression.
    INLINE.lastIndex = node ? next : at + 1;
    if (node) {
      add(at, node);
      shown = next;
    }
  }
  add(text.length);
  return nodes;
};

const paragraph = (text) => split(text).map((piece) => h("p", {}, ...inline(piece)));

const codeBlock = (text, language) =>
  h("div", { class: "code" },
    h("div", { class: "row" }, h("span", { class: "dim grow" }, language),
      copyButton((button) => button.parentElement.nextSibling.textContent, "code")),
    h("pre", {}, ...split(text).map((piece) => h("code", {}, piece))));

const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());

const tableRow = (line) => h("tr", {}, ...cells(line).map((cell) => h("td", {}, ...inline(cell))));

const table = (lines) =>
  h("table", {},
    h("thead", {}, h("tr", {}, ...cells(lines[0]).map((cell) => h("th", { scope: "col" }, ...inline(cell))))),
    h("tbody", {}, ...lines.slice(2).map(tableRow)));

const isBlockStart = (line) => FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || ITEM.test(line);

/**
 * Return a list that begins at a line, and the number of lines that it has. Indented lines belong to an item. A list
 * that is not within another block ends after MAX_ITEMS items, if its next item can begin another one.
 * @returns {[Element, number]}
 */
const listBlock = (lines, start, depth) => {
  const [, indent, marker] = ITEM.exec(lines[start]);
  const isOrdered = /\d/.test(marker);
  const node = h(isOrdered ? "ol" : "ul");
  if (isOrdered && parseInt(marker) !== 1) node.start = parseInt(marker);
  let at = start, content = [], isBlank = false;
  const finish = () => content.length && node.append(h("li", {}, ...nodesOf(content, depth + 1)));
  for (; at < lines.length; at++) {
    const line = lines[at], item = ITEM.exec(line);
    const spaces = line.search(/\S/);
    if (item && item[1].length < indent.length + 2 && item[1].length >= indent.length) {
      if (/\d/.test(item[2]) !== isOrdered || RULE.test(line)) break;
      finish();
      const count = node.childElementCount;
      if (!depth && count >= MAX_ITEMS && (!isOrdered || parseInt(item[2]) === node.start + count)) return [node, at - start];
      content = [item[3]];
    } else if (spaces < 0 || spaces > indent.length) content.push(line.slice(Math.min(Math.max(spaces, 0), indent.length + (isOrdered ? 3 : 2))));
    else if (isBlank || isBlockStart(line)) break;
    else content.push(line);
    isBlank = spaces < 0;
  }
  finish();
  return [node, at - start];
};

/** Yield the blocks of a text: their nodes, the line at which each begins, the text of a paragraph, and the number of rows of a table. */
function* blocksOf(lines, depth) {
  for (let at = 0; at < lines.length;) {
    const line = lines[at], start = at;
    const fence = FENCE.exec(line), heading = HEADING.exec(line);
    // Returns the lines up to the first one for which the condition is true.
    const until = (isEnd) => {
      const found = [];
      for (; at < lines.length && !isEnd(lines[at]); at++) found.push(lines[at]);
      return found;
    };
    if (!line.trim()) at++;
    else if (fence) {
      at++;
      const indent = line.search(/\S/), end = fence[1];
      const content = until((each) => each.trim().startsWith(end) && !each.trim().replaceAll(end[0], ""));
      const text = content.map((each) => each.slice(Math.min(indent, Math.max(each.search(/\S/), 0)))).join("\n");
      at++;
      yield { start, nodes: [codeBlock(text, fence[2])] };
    } else if (heading) {
      at++;
      yield { start, nodes: [h("h" + Math.min(heading[1].length + 3, 6), {}, ...inline((heading[2] ?? "").trim().replace(/ #+$/, "")))] };
    } else if (RULE.test(line)) {
      at++;
      yield { start, nodes: [h("hr")] };
    } else if (QUOTE.test(line) && depth < MAX_DEPTH) {
      const content = until((each) => !QUOTE.test(each)).map((each) => each.replace(QUOTE, ""));
      yield { start, nodes: [h("blockquote", {}, ...nodesOf(content, depth + 1))] };
    } else if (ITEM.test(line) && depth < MAX_DEPTH) {
      const [node, count] = listBlock(lines, at, depth);
      at += count;
      yield { start, nodes: [node] };
    } else if (line.includes("|") && DIVIDER.test(lines[at + 1] ?? "") && /-/.test(lines[at + 1])) {
      const found = until((each) => !each.includes("|"));
      yield { start, nodes: [table(found)], rows: found.length - 2 };
    } else {
      at++;
      const text = [line, ...until((each) => !each.trim() || (isBlockStart(each) && depth < MAX_DEPTH))].join("\n");
      yield { start, nodes: paragraph(text), text };
    }
  }
}

const nodesOf = (lines, depth) => [...blocksOf(lines, depth)].flatMap(({ nodes }) => nodes);

/** Change a node so that it equals another one. Text nodes are kept and extended, so that a selection in them is kept. */
const patch = (old, now) => {
  if (old.nodeName !== now.nodeName) old.replaceWith(now);
  else if (old.nodeType === 3) {
    if (now.data.startsWith(old.data)) now.length > old.length && old.appendData(now.data.slice(old.length));
    else old.data = now.data;
  } else if (old.nodeName !== "BUTTON") {
    for (const { name, value } of now.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
    patchChildren(old, 0, [...now.childNodes]);
  }
};

const patchChildren = (parent, from, nodes) => {
  const before = [...parent.childNodes].slice(from);
  nodes.forEach((node, at) => (before[at] ? patch(before[at], node) : parent.append(node)));
  before.slice(nodes.length).forEach((node) => node.remove());
};

/**
 * Return a function that shows a Markdown text in an element. When the text grows, only its last block is parsed again,
 * and of a table only its last row.
 * @returns {(text: string) => void}
 */
const markdown = (parent) => {
  // The end of the text that is final, and the number of its nodes. If it is within a table, also its number of rows.
  let shown = "", at = 0, count = 0, rows = null;
  return (text) => {
    if (text === shown) return;
    if (!text.startsWith(shown)) {
      at = count = 0;
      rows = null;
    }
    shown = text;
    let lines = text.slice(at).split("\n");
    if (rows !== null) {
      const end = lines.findIndex((line) => !line.includes("|"));
      const found = end < 0 ? lines : lines.slice(0, end);
      const isOpen = end < 0 || (end === lines.length - 1 && !lines[end]);
      patchChildren(parent.childNodes[count - 1].tBodies[0], rows, found.map(tableRow));
      const final = isOpen ? found.slice(0, -1) : found;
      rows += final.length;
      for (const line of final) at += line.length + 1;
      if (isOpen) return;
      rows = null;
      lines = lines.slice(end);
    }
    const blocks = [...blocksOf(lines, 0)];
    patchChildren(parent, count, blocks.flatMap(({ nodes }) => nodes));
    const last = blocks.at(-1);
    if (!last) return;
    // Everything before the last piece of the last block is final.
    for (const { nodes } of blocks.slice(0, -1)) count += nodes.length;
    const isTable = last.rows > 0;
    for (const line of lines.slice(0, last.start + (isTable ? last.rows + 1 : 0))) at += line.length + 1;
    if (isTable) {
      rows = last.rows - 1;
      count++;
    }
    for (const piece of last.text ? split(last.text).slice(0, -1) : []) {
      at += piece.length;
      count++;
    }
  };
};
