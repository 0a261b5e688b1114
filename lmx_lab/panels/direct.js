// Requests to the server that do not use the kernel, because it may be busy.

/**
 * Send the fields in a POST request to the first address of the server that this page can reach. Loopback is used only if the page
 * comes from this machine, because elsewhere it would be the reader's own machine. `signal` aborts further requests.
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
