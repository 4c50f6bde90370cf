"use strict";
// The page of one campaign. Everything that comes from outside is put in as text, never as markup.
const $ = (id) => document.getElementById(id);
const KEY = document.body.dataset.campaign;
const API = "/api/v1/campaigns/" + encodeURIComponent(KEY);
let now = null;

const count = (n) => Number(n).toLocaleString("en-US");
const rate = (r) => (r >= 100 ? count(Math.round(r)) : r >= 10 ? r.toFixed(1) : r > 0 ? r.toFixed(2) : "0") + "/s";
const percent = (s) => (s === 0 ? "0 %" : s < 0.001 ? "<0.1 %" : (100 * s).toFixed(1) + " %");
function span(s) {
  if (s === null || s === undefined) return "";
  s = Math.round(s);
  if (s < 60) return s + " s";
  if (s < 3600) return Math.floor(s / 60) + " min" + (s < 120 && s % 60 ? " " + (s % 60) + " s" : "");
  if (s < 172800) return Math.floor(s / 3600) + " h " + Math.floor((s % 3600) / 60) + " min";
  return Math.floor(s / 86400) + " d " + Math.floor((s % 86400) / 3600) + " h";
}
function clock(us) {
  const d = new Date(us / 1000), today = new Date();
  const time = d.toLocaleTimeString("en-GB");
  return d.toDateString() === today.toDateString() ? time : d.toLocaleDateString("en-CA") + " " + time;
}
function finish(s) {
  if (s === null || s === undefined) return "";
  const d = new Date(Date.now() + s * 1000), today = new Date();
  const days = Math.round((new Date(d.toDateString()) - new Date(today.toDateString())) / 86400000);
  const time = d.toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" });
  return days === 0 ? "at " + time : days === 1 ? "tomorrow " + time : d.toLocaleDateString("en-CA") + " " + time;
}

function set(node, text) { if (node.textContent !== text) node.textContent = text; }
function make(tag, text, className) {
  const node = document.createElement(tag);
  if (text !== undefined) node.textContent = text;
  if (className) node.className = className;
  return node;
}
function pill(kind, text) { return make("span", text, "pill " + kind); }

// Rows are kept by key, so that a focused button stays focused when numbers change.
function fill(body, items, keyOf, build, update) {
  const known = new Map([...body.children].map((row) => [row.dataset.key, row]));
  let at = 0;
  for (const item of items) {
    const key = keyOf(item);
    let row = known.get(key);
    if (row) known.delete(key);
    else { row = build(item); row.dataset.key = key; }
    if (body.children[at] !== row) body.insertBefore(row, body.children[at] || null);
    update(row, item);
    at += 1;
  }
  for (const row of known.values()) row.remove();
}
function cells(row, labels, first) {
  labels.forEach((label, i) => {
    const cell = make(i === 0 && first ? "th" : "td");
    if (i === 0 && first) cell.scope = "row"; else cell.dataset.label = label;
    row.append(cell);
  });
  return row;
}

const STATE = {
  unplanned: "no plan yet", planned: "planned, not started", sending: "sending", waiting: "waiting for retries", paused: "paused",
  stopped: "stopped, rows are left", cancelled: "cancelled", finished: "finished",
};
const LIMIT = { budget: "budget", throttle: "throttle", suspended: "suspended", slowed: "slowed", nothing: "nothing" };

function show(s) {
  now = s;
  set($("state"), STATE[s.state] || s.state);
  $("state").className = "pill " + s.state;
  document.title = s.id + ": " + (STATE[s.state] || s.state);
  const done = s.rows - s.left, share = s.rows ? done / s.rows : 0;
  set($("done"), count(done) + " of " + count(s.rows) + " rows have their outcome");
  set($("share"), s.left && share > 0.999 ? ">99.9 %" : (100 * share).toFixed(1) + " %");
  $("bar").max = s.rows || 1;
  $("bar").value = done;
  const numbers = {
    sent: count(s.accepted), bounced: count(s.bounced), deferrals: count(s.deferrals), in_doubt: count(s.in_doubt),
    left: count(s.left), rate: rate(s.per_second),
    finish: s.finish_s === null ? ({ finished: "finished", paused: "paused", cancelled: "cancelled" }[s.state] || "unknown") : "in " + span(s.finish_s),
  };
  for (const [name, text] of Object.entries(numbers)) set($("n-" + name), text);
  set($("s-left"), [s.waiting ? count(s.waiting) + " wait for a retry" : "", s.in_flight ? count(s.in_flight) + " in flight" : ""].filter(Boolean).join(", "));
  set($("s-finish"), [finish(s.finish_s), s.finish_of ? "last: " + s.finish_of : ""].filter(Boolean).join(", "));
  set($("s-rate"), s.capacity_planned_s ? "planned " + rate(s.rows / s.capacity_planned_s) + ", in " + span(s.capacity_planned_s) : "");
  const others = [["invalid", s.invalid], ["suppressed", s.suppressed], ["given up", s.expired], ["finished by a sender that was killed", s.uncounted]];
  set($("others"), others.filter(([, n]) => n).map(([word, n]) => count(n) + " " + word).join(", "));
  set($("queues"), "queues: " + count(s.ready) + " ready, " + count(s.parked) + " parked, " + count(s.waiting) + " waiting, " + count(s.in_flight) + " in flight; batches: "
    + (Object.entries(s.batches).map(([state, n]) => count(n) + " " + state).join(", ") || "none"));
  set($("reason"), s.reason);
  $("reason").hidden = !s.reason;
  $("reason").className = s.per_second > 0 ? "none" : "error";  // one provider's trouble while all others go on
  $("report").hidden = !s.has_report;
  $("final").hidden = !s.has_report && s.state !== "finished";
  if (!$("final").hidden) final(s);
  $("pause").hidden = !["planned", "sending", "waiting", "stopped"].includes(s.state);
  $("resume").hidden = s.state !== "paused";
  $("start").hidden = !["planned", "stopped"].includes(s.state);
  $("cancel").hidden = ["cancelled", "finished", "unplanned"].includes(s.state);
  providers(s);
  machines(s);
  replies(s);
  events(s);
  set($("updated"), "as of " + clock(s.at_us));
}

// What `engine merge-logs` proved; read when the page first sees that it is there.
let reported = null;
async function final(s) {
  if (reported === s.has_report) return;
  reported = s.has_report;
  if (!s.has_report) {
    set($("final-words"), "Each row has its outcome. `engine merge-logs` on the machine with this folder proves it from the logs; its report is shown here then.");
    return;
  }
  const answer = await fetch(API + "/report");
  if (!answer.ok) { set($("final-words"), "It cannot be read."); return; }
  const r = await answer.json();
  $("outcomes").replaceChildren(...Object.entries(r.outcomes).map(([name, n]) => {
    const box = make("div");
    box.append(make("dt", name.replaceAll("_", " ")), make("dd", count(n)));
    return box;
  }));
  const words = (r.adds_up ? "All " + count(r.rows) + " rows are accounted for" : "The sum does not add up: " + r.gaps.join("; "))
    + ", " + count(r.attempts) + " attempts, " + (r.duplicate_rows ? count(r.duplicate_rows) + " rows twice" : "none twice") + "; merged " + clock(r.merged_at_us) + ". ";
  const link = make("a", "The whole report");
  link.href = "/c/" + encodeURIComponent(KEY) + "/report";
  $("final-words").replaceChildren(words, link);
}

function providers(s) {
  const labels = ["provider", "now", "sent", "bounced", "4xx share", "rate", "connections", "ready", "left", "through", "do"];
  fill($("providers"), s.providers, (p) => p.name, (p) => {
    const row = cells(make("tr"), labels, true);
    [2, 3, 4, 5, 6, 7, 8].forEach((i) => row.children[i].classList.add("number"));
    row.children[0].textContent = p.name;
    row.children[1].append(make("div"));
    row.children[1].firstChild.append(pill("", ""), make("span", "", "why"));
    const button = make("button", "Slow…", "small");
    button.setAttribute("aria-label", "Slow " + p.name);
    button.addEventListener("click", () => slow(p.name));
    row.children[10].append(button);
    return row;
  }, (row, p) => {
    const c = row.children, box = c[1].firstChild;
    const idle = !p.connections && !p.waiting && p.limit_kind !== "suspended" && s.state !== "sending";
    set(box.children[0], idle ? "idle" : LIMIT[p.limit_kind]);
    box.children[0].className = "pill " + (idle ? "" : p.limit_kind);
    let why = idle ? "" : p.limit_kind === "nothing" ? "nothing limits it" : p.limit.replace(/^(throttle: |budget: |slowed )/, "");
    if (p.suspended_until_us) why = "until " + clock(p.suspended_until_us) + ": " + p.limit.replace(/^suspended for \d+ s: /, "");
    set(box.children[1], why);
    set(c[2], count(p.accepted));
    set(c[3], count(p.bounced));
    set(c[4], percent(p.later_share));
    set(c[5], rate(p.per_second) + (p.planned_per_second ? " of " + rate(p.planned_per_second) : ""));
    set(c[6], count(p.connections) + " of " + count(p.allowed));
    set(c[7], count(p.waiting));
    set(c[8], p.left === null ? "" : count(p.left));
    set(c[9], p.left === 0 ? "through" : p.finish_s === null || !["sending", "waiting"].includes(s.state) ? "" : "in " + span(p.finish_s) + ", " + finish(p.finish_s));
  });
  $("no-providers").hidden = s.providers.length > 0;
  fill($("of"), [{ name: "" }, ...s.providers], (p) => p.name, (p) => { const o = make("option", p.name || "all providers"); o.value = p.name; return o; }, () => {});
}

function machines(s) {
  const labels = ["machine", "state", "partition", "processes", "connections", "rate", "lease", "do"];
  fill($("machines"), s.machines, (m) => m.incarnation, (m) => {
    const row = cells(make("tr"), labels, true);
    [2, 3, 4, 5].forEach((i) => row.children[i].classList.add("number"));
    row.children[0].textContent = m.sender + " (pid " + m.pid + ")";
    row.children[1].append(pill("", ""));
    const button = make("button", "Release", "small danger");
    button.setAttribute("aria-label", "Release " + m.sender + ", pid " + m.pid);
    button.addEventListener("click", () => release(m));
    row.children[7].append(button);
    return row;
  }, (row, m) => {
    const c = row.children;
    set(c[1].firstChild, m.state);
    c[1].firstChild.className = "pill " + m.state;
    set(c[2], m.partition === null ? "" : String(m.partition));
    set(c[3], m.state === "sending" ? count(m.processes) : "");
    set(c[4], m.state === "sending" ? count(m.connections) : "");
    set(c[5], m.state === "sending" ? rate(m.per_second) : "");
    set(c[6], m.state === "sending" || m.state === "silent" ? "heard " + span(m.heard_s) + " ago, lease " + span(m.lease_s) : "ended " + span(m.heard_s) + " ago");
    c[7].firstChild.hidden = m.state !== "sending" && m.state !== "silent";
  });
  $("no-machines").hidden = s.machines.length > 0;
}

function replies(s) {
  fill($("replies"), s.replies, (r) => r.provider + "\n" + r.text, (r) => {
    const row = cells(make("tr"), ["times", "provider", ""], false);
    row.children[0].classList.add("number");
    row.children[1].textContent = r.provider;
    row.children[2].textContent = r.text;
    row.children[2].className = "reply";
    delete row.children[2].dataset.label;
    return row;
  }, (row, r) => set(row.children[0], count(r.count)));
  $("no-replies").hidden = s.replies.length > 0;
}

function line(at_us, text) {
  const item = make("li");
  const time = make("time", clock(at_us));
  time.dateTime = new Date(at_us / 1000).toISOString();
  item.append(time, text);
  return item;
}
function eventWords(e) {
  const rest = Object.entries(e).filter(([k]) => !["event", "at_us", "sender"].includes(k)).map(([k, v]) => k + "=" + v);
  return e.event.replaceAll("_", " ") + (rest.length ? ": " + rest.join(", ") : "") + " (" + e.sender + ")";
}
function events(s) {
  fill($("events"), s.events, (e) => e.at_us + eventWords(e), (e) => line(e.at_us, eventWords(e)), () => {});
  $("no-events").hidden = s.events.length > 0;
}
async function actions() {
  const answer = await fetch(API + "/actions");
  if (!answer.ok) return;
  const told = (await answer.json()).actions;
  const words = (a) => a.who + ": " + a.what + (a.on ? " " + a.on : "") + (a.value ? " " + a.value : "") + (a.failed ? " — failed: " + a.failed : "");
  fill($("actions"), told, (a) => a.at_us + words(a), (a) => line(a.at_us, words(a)), () => {});
  $("no-actions").hidden = told.length > 0;
}

// -- charts ------------------------------------------------------------------------------------------------------------
const SVG = "http://www.w3.org/2000/svg";
function draw(svg, ago, values, most) {
  svg.replaceChildren();
  for (const y of [0, 50, 100]) {
    const grid = document.createElementNS(SVG, "line");
    for (const [name, v] of [["x1", 0], ["x2", 300], ["y1", y], ["y2", y]]) grid.setAttribute(name, v);
    grid.setAttribute("class", "grid");
    svg.append(grid);
  }
  const length = Math.max(60, ...ago);
  const path = document.createElementNS(SVG, "polyline");
  path.setAttribute("points", values.map((v, i) => (300 * (1 - ago[i] / length)).toFixed(1) + "," + (100 * (1 - v / most)).toFixed(1)).join(" "));
  path.setAttribute("class", "curve" + (svg.id === "later" ? " later" : ""));
  svg.append(path);
  return length;
}
async function charts() {
  const of = $("of").value;
  const answer = await fetch(API + "/history" + (of ? "?provider=" + encodeURIComponent(of) : ""));
  if (!answer.ok || of !== $("of").value) return;
  const h = await answer.json();
  const top = Math.max(1, ...h.per_second), topLater = Math.max(0.05, ...h.later_share);
  const length = draw($("pace"), h.ago_s, h.per_second, top);
  draw($("later"), h.ago_s, h.later_share, topLater);
  set($("pace-top"), "top " + rate(top));
  set($("later-top"), "top " + percent(topLater));
  for (const node of document.querySelectorAll(".since")) set(node, span(length) + " ago");
  const whose = of ? " by " + of : "";
  $("pace").setAttribute("aria-label", "Accepted messages a second" + whose + " over the last " + span(length) + "; at most " + rate(top) + ", now " + rate(h.per_second.at(-1) || 0));
  $("later").setAttribute("aria-label", "Share of answers" + whose + " that said later over the last " + span(length) + "; at most " + percent(topLater) + ", now " + percent(h.later_share.at(-1) || 0));
}

// -- acting ------------------------------------------------------------------------------------------------------------
const dialog = $("confirm");
function ask(title, words, button, fields, act) {
  set($("confirm-title"), title);
  set($("confirm-words"), words);
  set($("confirm-do"), button);
  $("confirm-fields").replaceChildren(...fields);
  set($("confirm-error"), "");
  dialog.onsubmit = async (event) => {
    event.preventDefault();
    $("confirm-do").disabled = true;
    try {
      const problem = await act();
      if (problem) set($("confirm-error"), problem);
      else dialog.close();
    } finally { $("confirm-do").disabled = false; }
  };
  dialog.showModal();
}
const randomKey = () => [...crypto.getRandomValues(new Uint8Array(16))].map((b) => b.toString(16).padStart(2, "0")).join("");
async function post(path, body) {
  let answer;
  try {
    answer = await fetch(API + path, {
      method: "POST",
      headers: { "Content-Type": "application/json", "X-Rowpost": "1", "Idempotency-Key": randomKey() },
      body: JSON.stringify(body),
    });
  } catch { return "the server cannot be reached"; }
  if (!answer.ok) {
    const problem = await answer.json().catch(() => ({}));
    return problem.detail || problem.title || "it was refused (" + answer.status + ")";
  }
  set($("told"), "Done, and recorded.");
  actions();
  return "";
}
function field(label, name, step, least) {
  const box = make("label", label), input = make("input");
  input.type = "number"; input.name = name; input.step = step; input.min = least; input.inputMode = "decimal";
  box.append(input);
  return box;
}
function slow(name) {
  const p = now.providers.find((one) => one.name === name);
  const fields = [field("Connections at most", "connections", "1", "1"), field("Messages a second at most", "per_second", "0.01", "0.01"), field("For minutes (empty: until lifted)", "minutes", "1", "1")];
  const inputs = fields.map((one) => one.querySelector("input"));
  if (p && p.slowed.connections) inputs[0].value = p.slowed.connections;
  if (p && p.slowed.per_second) inputs[1].value = p.slowed.per_second;
  ask("Slow " + name + "?", "All machines obey within a second. Empty limits lift what was said before.", "Slow it", fields, () => {
    const [connections, per_second, minutes] = inputs.map((one) => (one.value ? Number(one.value) : null));
    return post("/providers/" + encodeURIComponent(name) + "/slow", { connections, per_second, for_s: minutes ? minutes * 60 : null });
  });
}
function release(m) {
  ask("Release " + m.sender + "?", "Its lease ends and others may take its batches. It may still be running: what it has in flight finishes, and it stops when it hears of this.",
    "Release it", [], () => post("/machines/" + encodeURIComponent(m.incarnation) + "/release", {}));
}
$("pause").addEventListener("click", () => ask("Pause the campaign?", "Nothing new is attempted until you resume; what is in flight finishes.", "Pause", [], () => post("/pause", {})));
$("resume").addEventListener("click", () => ask("Resume the campaign?", "Senders go on within a second.", "Resume", [], () => post("/resume", {})));
$("cancel").addEventListener("click", () => ask("Cancel the campaign?", "What is in flight finishes; " + count(now.left) + " rows stay unsent. This cannot be taken back here.", "Cancel the campaign", [], () => post("/cancel", {})));
$("start").addEventListener("click", () => {
  const one = field("Partition", "partition", "1", "0");
  one.querySelector("input").value = "0";
  ask("Start sending?", "A sender of this partition starts on the machine of this server, and runs on without it.", "Start", [one],
    () => post("/start", { partition: Number(one.querySelector("input").value || 0) }));
});
$("confirm-no").addEventListener("click", () => dialog.close());
$("signout").addEventListener("click", async () => {
  await fetch("/logout", { method: "POST", headers: { "X-Rowpost": "1" } });
  location.href = "/login";
});

// -- news --------------------------------------------------------------------------------------------------------------
show(JSON.parse($("snapshot").textContent));
actions();
charts();
setInterval(charts, 5000);
$("of").addEventListener("change", charts);
const source = new EventSource(API + "/stream");
source.addEventListener("snapshot", (event) => { $("offline").hidden = true; show(JSON.parse(event.data)); });
// What changed since the snapshot that we have. One that we missed comes whole.
source.addEventListener("changes", (event) => {
  const change = JSON.parse(event.data);
  if (change.since_us !== now.at_us) return;
  const known = new Map(now.providers.map((p) => [p.name, p]));
  for (const [name, p] of Object.entries(change.providers || {})) known.set(name, { ...known.get(name), ...p });
  const order = change.order || now.providers.map((p) => p.name);
  show({ ...now, ...change.values, at_us: change.at_us, providers: order.map((name) => known.get(name)) });
});
source.addEventListener("error", () => { $("offline").hidden = false; });
