// The page of the server's routes: the input and output of each one, from the OpenAPI document, and a form that sends a request.

const MAX_SHOWN = 2e5;
const LIMITS = ["minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum", "minLength", "maxLength", "minItems", "maxItems", "pattern"];
let spec = {};

const nameOf = (ref) => ref.split("/").at(-1);
const resolved = (schema) => (schema?.$ref ? spec.components.schemas[nameOf(schema.$ref)] : schema ?? {});
const schemaId = (name) => "schema-" + name;

/** Return nodes that describe the type of a schema. A schema with a name is a link to its description. */
const typeOf = (schema) => {
  const { $ref, allOf, const: value, contentSchema, items, additionalProperties: values, properties } = schema;
  // The other parts of `allOf` limit the values of a named schema.
  const options = schema.anyOf ?? schema.oneOf ?? allOf?.slice(0, 1);
  const within = (each) => (each.anyOf ?? each.oneOf ? ["(", ...typeOf(each), ")"] : typeOf(each));
  const join = (all, sign, show) => all.flatMap((each, at) => [...(at ? [sign] : []), ...show(each)]);
  // Without the timer, a link to the current address would not open a description that was closed.
  if ($ref) return [h("a", { href: "#" + schemaId(nameOf($ref)), onclick: () => setTimeout(openTarget) }, nameOf($ref))];
  if (options) return join(options, " or ", typeOf);
  if (schema.enum || value !== undefined) return [(schema.enum ?? [value]).map((each) => JSON.stringify(each)).join(" or ")];
  if (contentSchema) return ["JSON of ", ...within(contentSchema)];
  if (properties) return ["{", ...join(Object.entries(properties), ", ", ([name, each]) => [name + ": ", ...typeOf(each)]), "}"];
  const limits = LIMITS.filter((name) => name in schema).map((name) => name + " " + schema[name]).join(", ");
  const type = items ? ["list of ", ...within(items)] : values?.constructor === Object ? ["object of ", ...within(values)] : [schema.type ?? "any value"];
  return limits ? [...type, " (" + limits + ")"] : type;
};

/** Return an example of a schema: its own one, or the required fields. */
const exampleOf = (schema, depth = 0) => {
  const { examples, default: value, const: only, enum: values, anyOf, oneOf, type, properties = {}, required = [], items } = resolved(schema);
  if (examples) return examples[0];
  if (depth > 5) return null;
  const next = (each) => exampleOf(each, depth + 1);
  if (value !== undefined || only !== undefined || values) return value ?? only ?? values?.[0] ?? null;
  if (anyOf ?? oneOf) return next((anyOf ?? oneOf)[0]);
  if (items) return [next(items)];
  if (type === "object") return Object.fromEntries(required.map((name) => [name, next(properties[name])]));
  return { string: "", integer: 0, number: 0, boolean: false }[type] ?? null;
};

const prose = (text = "") => {
  const node = h("div", { class: "text" });
  markdown(node)(text);
  return node;
};
const tableOf = (caption, names, rows) =>
  h("table", { class: caption }, h("caption", {}, caption), h("thead", {}, h("tr", {}, ...names.map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", {}, ...rows.map(([first, ...rest]) => h("tr", {}, h("th", { scope: "row" }, ...first), ...rest.map((cell) => h("td", {}, ...cell))))));

const describe = ({ description = "", default: value }) =>
  inline(value == null ? description : description.replace(/\.?$/, description && ". ") + "Default: `" + JSON.stringify(value) + "`");

/** Return the description of a schema: a table of its fields, or its type. */
const schemaNodes = (schema) => {
  const { description, properties = {}, required = [] } = schema;
  const isIgnored = ([, field]) => /^Ignored/.test(field.description);
  const fields = Object.entries(properties), ignored = fields.filter(isIgnored);
  if (!fields.length) return [prose(description), h("p", {}, ...typeOf(schema))];
  return [
    prose(description),
    tableOf("fields", ["field", "type", "description"], fields.filter((field) => !isIgnored(field)).map(([name, field]) => [
      [h("code", {}, name), required.includes(name) ? " (required)" : ""], typeOf(field), describe(field)])),
    ignored.length ? h("p", { class: "dim" }, "Accepted and ignored: " + ignored.map(([name]) => name).join(", ") + ".") : null,
  ];
};

/** Quote a text for a shell. */
const quoted = (text) => "'" + text.replaceAll("'", "'\\''") + "'";

/** Create the form that sends a request, and shows the response while it arrives. */
const tryForm = (path, method, { parameters = [], requestBody, security }) => {
  const inputs = parameters.map((each) =>
    [each, h("input", { required: !!each.required, placeholder: String(each.schema.default ?? ""), autocomplete: "off" })]);
  const example = requestBody && JSON.stringify(exampleOf(requestBody.content["application/json"].schema), null, 2);
  const body = requestBody ? h("textarea", { rows: Math.min(20, example.split("\n").length + 1), spellcheck: false, value: example }) : null;
  const address = () => {
    const query = new URLSearchParams();
    let found = path;
    for (const [{ name, in: place }, { value }] of inputs)
      // An id of a model may have slashes. The command has a placeholder until there is a value.
      if (place === "path") found = found.replace("{" + name + "}", () => encodeURIComponent(value || name.toUpperCase()).replaceAll("%2F", "/"));
      else if (value) query.set(name, value);
    return found.slice(1) + (query.size ? "?" + query : "");
  };
  const command = h("code"), status = h("span", { class: "dim grow", role: "status" });
  const showCommand = () => set(command, [
    "curl " + (method === "get" ? "" : "-X " + method.toUpperCase() + " ") + quoted(new URL(address(), BASE).href),
    spec.security && security?.length !== 0 ? '-H "Authorization: Bearer $LMX_LAB_API_KEY"' : "",
    body ? "-H 'Content-Type: application/json' -d " + quoted(body.value) : "",
  ].filter(Boolean).join(" "));
  const output = h("div", { class: "text scroll response", tabIndex: 0, role: "group", "aria-label": "response", hidden: true });
  const showText = plain(output);
  const go = h("button", { class: "go" }, "Send");
  let running = null;

  const receive = async (response, began) => {
    const reader = response.body.getReader(), decoder = new TextDecoder();
    const head = response.status + " " + response.statusText, type = response.headers.get("content-type") ?? "";
    const isText = /^(text\/|application\/(json|x-ndjson))/.test(type);
    for (let text = "", end = "", size = 0; !end;) {
      const { done, value } = await reader.read();
      size += value?.length ?? 0;
      text = isText ? text + decoder.decode(value, { stream: !done })
        : size + " bytes of " + type + ". To save them, add -o FILE to the command in a terminal.";
      if (done) end = " · " + (performance.now() - began).toFixed(0) + " ms" + (response.headers.has("x-lmx-ignored") ? " · ignored: " + response.headers.get("x-lmx-ignored") : "");
      else if (text.length > MAX_SHOWN) {
        text = text.slice(0, MAX_SHOWN);
        end = " · only the first " + MAX_SHOWN + " characters are shown";
        running.abort();
      }
      if (done && /^application\/json/.test(type)) text = JSON.stringify(JSON.parse(text), null, 2);
      set(status, head + end);
      showText(size ? text : "");
      output.hidden = !size;
    }
  };
  const run = async () => {
    if (running) return running.abort();
    running = new AbortController();
    set(go, "Stop");
    set(status, "waiting for the response");
    output.hidden = true;
    try {
      const began = performance.now(), sent = body ? { body: body.value, headers: { "Content-Type": "application/json" } } : {};
      await receive(await fetchWithKey(address(), { method: method.toUpperCase(), signal: running.signal, ...sent }), began);
    } catch (error) {
      const lost = error instanceof TypeError ? "The connection was lost before the response was complete." : error.message;
      set(status, error.name === "AbortError" ? "stopped" : lost);
    }
    running = null;
    set(go, "Send");
  };
  showCommand();
  return h("form", { oninput: showCommand, onsubmit: (event) => (event.preventDefault(), run()) },
    ...inputs.map(([{ name, required, description, schema }, input]) =>
      h("label", {}, h("span", {}, h("code", {}, name), required ? " (required): " : ": ", ...typeOf(schema), description ? ". " : "", ...inline(description ?? "")), input)),
    body && h("label", {}, "request body", body),
    h("div", { class: "code" }, h("div", { class: "row" }, h("span", { class: "dim grow" }, "the same request in a terminal"),
      copyButton(() => command.textContent, "command")), h("pre", {}, command)),
    h("div", { class: "row" }, go, status), output);
};

const routeNodes = (path, method, operation) => {
  const { description, requestBody, responses, "x-websocket": socket } = operation;
  const media = ({ content = {} }) => Object.entries(content).flatMap(([type, { schema }], at) => [at ? "; " : "", type + ": ", ...typeOf(schema)]);
  return [
    prose(description),
    requestBody ? h("p", {}, "Body: ", ...media(requestBody)) : null,
    ...(socket ? [h("p", {}, "The client sends ", ...typeOf(socket.sends), "; the server sends ", ...typeOf(socket.receives), ".")]
      : [tryForm(path, method, operation)]),
    tableOf("responses", ["status", "description", "content"], Object.entries(responses).map(([status, response]) =>
      [[status], inline(response.description), media(response)])),
  ];
};

// The page

/** Create a closed element, whose content is created when it is opened. The address of the page then refers to it. */
const fold = (id, summary, fill) => {
  const content = h("div", { class: "content" });
  const node = h("details", { id, ontoggle: () => {
    if (!node.open) return;
    if (!content.firstChild) content.append(...fill().filter((each) => each !== null));
    history.replaceState(null, "", "#" + id);
  } }, h("summary", {}, ...summary), content);
  return node;
};
const problem = h("p", { class: "error", role: "alert" });
const intro = h("p", {}, "The input and output of each route.");
const filter = h("input", { type: "search", placeholder: "such as chat or ErrorBody", oninput: () => {
  const text = filter.value.trim().toLowerCase();
  let heading;
  for (const node of main.querySelectorAll("h2, details")) {
    node.hidden = node.tagName === "H2" || !node.firstChild.textContent.toLowerCase().includes(text);
    // A heading is shown if anything below it is.
    if (node.tagName === "H2") heading = node;
    else if (!node.hidden) heading.hidden = false;
  }
} });
const key = h("input", { type: "password", autocomplete: "current-password", required: true });
const keyForm = h("form", { hidden: true, onsubmit: (event) => {
  event.preventDefault();
  // No key of a server has other characters, and fetch() fails if a header has them.
  kept.set("key", key.value.replace(/[^!-~]/g, ""));
  start();
} }, h("label", {}, "API key", key), h("div", { class: "row" }, h("button", { class: "go" }, "Use the key")));
const main = h("main", {}, h("h1", {}, "Routes of LMX Lab"), intro, problem, keyForm, h("label", {}, "filter", filter));
document.body.append(h("div", { class: "lmx chat routes" }, main));

/** Open the description to which the address of the page refers. */
const openTarget = () => {
  const node = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (!node) return;
  node.open = true;
  node.hidden = false;
  node.firstChild.focus();
  node.scrollIntoView();
};
addEventListener("hashchange", openTarget);

const start = async () => {
  try {
    spec = await getJson("openapi.json");
  } catch (error) {
    keyForm.hidden = error.status !== 401;
    return set(problem, error.status !== 401 ? error.message : kept.get("key") ? "The key is wrong. Ask the operator of this server for the right one."
      : "This server requires an API key. The key is stored in this browser.");
  }
  if (keyForm.contains(document.activeElement)) filter.focus();
  keyForm.remove();
  set(problem, "");
  // A browser does not send the key if it follows a link.
  const file = spec.security && URL.createObjectURL(new Blob([JSON.stringify(spec, null, 2)], { type: "application/json" }));
  intro.append(" Programs can read this description from ", h("a", file ? { href: file, download: "openapi.json" } : { href: "openapi.json" }, "openapi.json"), ".",
    ...(file ? [] : [" See also ", h("a", { href: "about" }, "about this server"), "."]));
  const operations = Object.entries(spec.paths).flatMap(([path, methods]) =>
    Object.entries(methods).map(([method, operation]) => ({ path, method, operation })));
  for (const tag of new Set(operations.map(({ operation }) => operation.tags[0])))
    main.append(h("h2", {}, tag), ...operations.filter(({ operation }) => operation.tags[0] === tag).map(({ path, method, operation }) =>
      fold(operation.operationId, [h("b", { class: "method" }, operation["x-websocket"] ? "WS" : method.toUpperCase()), " ", h("code", {}, path)],
        () => routeNodes(path, method, operation))));
  main.append(h("h2", {}, "Schemas"), ...Object.entries(spec.components.schemas).map(([name, schema]) =>
    fold(schemaId(name), [h("code", {}, name)], () => schemaNodes(schema))));
  openTarget();
};
start();
