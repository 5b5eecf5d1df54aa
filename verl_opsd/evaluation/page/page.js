"use strict";
(() => {
  const $ = (id) => document.getElementById(id);
  const el = (tag, attributes = {}, ...children) => {
    const e = document.createElement(tag);
    for (const [k, v] of Object.entries(attributes)) k === "onclick" ? (e.onclick = v) : e.setAttribute(k, v);
    e.append(...children);
    return e;
  };
  const index = JSON.parse($("index").textContent);
  const STEP = 100;
  let shown = index.rows.map((_, i) => i), length = STEP, current = -1, common = null;

  const unpack = async (id) => {
    const bytes = Uint8Array.from(atob($(id).textContent), (c) => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    return JSON.parse(await new Response(stream).text());
  };
  const bits = (text) => {
    const bytes = atob(text), out = [];
    for (let i = 0; i < index.rows.length; i++) if (bytes.charCodeAt(i >> 3) & (1 << (i & 7))) out.push(i);
    return out;
  };

  // ---- the table of episodes
  const table = () => {
    const body = $("rows");
    body.replaceChildren();
    for (const i of shown.slice(0, length)) {
      const r = index.rows[i];
      const open = el("button", { class: "open", type: "button", onclick: () => show(i) }, r.id);
      const cells = r.cells.map((c, n) => el("td", index.left[n] ? { class: "l id" } : {}, c === null ? "-" : String(c)));
      body.append(el("tr", r.bad ? { class: "invalid" } : {}, el("td", { class: "l keep" }, open), ...cells, el("td", { class: "l keep" }, r.note)));
    }
    $("count").textContent = `${Math.min(length, shown.length)} of ${shown.length} shown`;
    $("more").hidden = length >= shown.length;
  };
  $("more").onclick = () => { length += 5 * STEP; table(); };
  $("all").onclick = () => select(index.rows.map((_, i) => i), "");
  const select = (rows, title) => {
    shown = rows;
    length = STEP;
    $("what").textContent = title ? `Behind “${title}”: ${rows.length} of ${index.rows.length} episodes` : `All ${rows.length} episodes`;
    $("all").hidden = !title;
    table();
  };
  document.addEventListener("click", (event) => {
    const a = event.target.closest("a.n");
    if (!a) return;
    event.preventDefault();
    select(bits(a.dataset.e), a.dataset.t);
    $("episodes").scrollIntoView();
    $("what").focus({ preventScroll: true });
  });

  // ---- one episode: two conversations
  const value = (q) => q < 0 ? 0 : 1e-6 * (2 ** (q / 8) - 1);
  const digits = (x) => (x >= 0.001 ? x.toPrecision(3) : x.toExponential(1));
  const integers = (text) => Array.from(text, (x) => x.codePointAt(0) - 0x5e);
  const tokens = (item, text) => {
    const lengths = integers(item.c);
    const pre = el("pre");
    let at = 0, plain = "";
    integers(item.k).forEach((q, n) => {
      const piece = text.slice(at, (at += lengths[n]));
      const d = value(q), share = Math.min(1, d / index.full);
      if (share < 0.04) { plain += piece; return; }
      pre.append(plain, el("span", { class: "t", style: `background:rgb(var(--heat)/${(0.75 * share).toFixed(2)})`, title: `${digits(d)} nats` }, piece));
      plain = "";
    });
    pre.append(plain);
    return pre;
  };
  const NAMES = { assistant: "policy", tool: "observation", user: "user", system: "system", peer: "message of the peer" };
  const message = (item) => {
    const text = typeof item.t === "number" ? common[item.t] : item.t;
    const about = [NAMES[item.r] || item.r];
    if (item.n !== undefined) about.push(`turn ${item.n}`);
    if (item.kind) about.push(item.kind === "malformed" ? "no valid tool call" : item.kind);
    if (item.s !== undefined) about.push(`${item.s} s`);
    if (item.k) {
      const codes = integers(item.k), known = codes.filter((q) => q >= 0).map(value), sum = known.reduce((a, b) => a + b, 0);
      about.push(`${codes.length} tokens, mean ${digits(sum / Math.max(1, known.length))}, max ${digits(known.reduce((a, b) => Math.max(a, b), 0))} nats`);
      if (known.length < codes.length) about.push(`${codes.length - known.length} of unknown divergence`);
    }
    const who = about.join(" · ");
    const body = item.k ? tokens(item, text) : el("pre", {}, text);
    const long = !item.k && item.r !== "assistant" && item.r !== "peer" && text.length > 1500;
    const box = el("div", { class: `m ${item.r}` });
    if (long) box.append(el("details", {}, el("summary", {}, `${who} · ${text.length} characters`), body));
    else box.append(el("div", { class: "who" }, who), body);
    return box;
  };
  const agent = (a, told) => {
    const head = `${a.name}, feature ${a.feature}: ${a.status}${told ? `, ${told}` : ""}`;
    const column = el("section", { tabindex: "0", "aria-label": head }, el("h4", {}, head));
    if (!a.items.length) column.append(el("p", { class: "muted" }, "No message was recorded."));
    column.append(...a.items.map(message));
    column.append(el("details", {}, el("summary", {}, `Patch, ${a.patch.length} characters`), el("pre", { class: "mono" }, a.patch)));
    return column;
  };
  const show = async (i) => {
    const r = index.rows[i], dialog = $("episode");
    current = i;
    history.replaceState(null, "", `#episode=${encodeURIComponent(r.id)}`);
    const step = (d) => { const n = shown[shown.indexOf(current) + d]; if (n !== undefined) show(n); };
    const header = el("header", {}, el("h3", { id: "eptitle", tabindex: "-1" }, r.id), el("span", {}, r.about));
    const body = el("div", { class: "two" });
    const right = el("span", { class: "right" },
      el("button", { type: "button", onclick: () => step(-1) }, "← previous"),
      el("button", { type: "button", onclick: () => step(1) }, "next →"),
      el("button", { type: "button", onclick: () => dialog.close() }, "close"));
    dialog.replaceChildren(el("div", { class: "ep" }, header, body));
    if (!dialog.open) dialog.showModal();
    if (r.block === null) {
      body.append(el("section", {}, el("p", {}, r.left_out)));
    } else {
      if (common === null) common = $("common") ? await unpack("common") : [];
      const e = await unpack(`b${r.block}`);
      const of = (a) => e.grade && e.grade.features.find((f) => f.id === a.feature);
      body.append(...e.agents.map((a) => { const f = of(a); return agent(a, f ? `${f.passed ? "passed" : "failed"} (${f.tests[0]} tests passed, ${f.tests[1]} failed)` : ""); }));
      if (!e.agents.length) body.append(el("section", {}, el("p", {}, "The pair did not end its run: no conversation was recorded.")));
      if (e.agents.some((a) => a.items.some((x) => x.k)))
        header.append(el("span", { class: "k" }, "divergence 0", el("i", { "aria-hidden": "true" }), `${digits(index.full)} nats and more`));
      for (const f of (e.grade && e.grade.features) || [])
        if (f.output) body.firstChild.append(el("details", {}, el("summary", {}, `Hidden tests of feature ${f.id}`), el("pre", { class: "mono" }, f.output)));
    }
    header.append(right);
    $("eptitle").focus();
    dialog.onkeydown = (event) => { if (event.key === "ArrowRight") step(1); if (event.key === "ArrowLeft") step(-1); };
  };
  $("episode").onclose = () => history.replaceState(null, "", "#episodes");
  select(shown, "");
  const linked = decodeURIComponent(location.hash).match(/^#episode=(.*)$/);
  const place = linked ? index.rows.findIndex((r) => r.id === linked[1]) : -1;
  if (place >= 0) show(place);
})();
