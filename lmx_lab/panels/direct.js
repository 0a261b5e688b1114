// Past the kernel: what must work although it is busy.

/**
 * POST to the first of the server's addresses that this page can reach. On a page from elsewhere, loopback would be the
 * reader's own machine. Once `signal` is aborted nothing more is sent.
 */
const direct = async (model, path, signal) => {
  const { url, proxy_url, proxy_path } = model.get("server");
  const near = /^(localhost|127\.0\.0\.1|\[::1])$/.test(location.hostname) || location.protocol === "vscode-webview:";
  for (const base of [near && url + "/", proxy_path, proxy_url]) {
    if (!base) continue;
    const answer = await fetch(new URL(path, new URL(base, location.href)), {
      method: "POST", headers: { "Content-Type": "application/json" }, body: "{}", signal,
    }).catch(() => null);
    if (answer?.ok) return answer.json();
  }
  throw new Error("no answer");
};
