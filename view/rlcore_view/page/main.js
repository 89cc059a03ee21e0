// Addresses, keys, and the frame around every page.

const TABS = [["/", "Overview", "o"], ["/steps", "Steps", "s"], ["/groups", "Groups", "g"], ["/prompts", "Prompts", "p"], ["/samples", "Samples", "a"], ["/timeline", "Timeline", "t"], ["/config", "Config", "c"]];
const KEYS_HELP = "o s g p a t c: pages · v: compare runs · j k: next and previous · u: up to the group · /: search";

function pageFor(path, query) {
  const [, name, id] = path.split("/");
  if (name === "steps") return stepsPage();
  if (name === "step") return stepPage(Number(id));
  if (name === "groups") return groupsPage(query);
  if (name === "group") return groupPage(Number(id), query);
  if (name === "prompts") return promptsPage(query);
  if (name === "prompt") return promptPage(Number(id));
  if (name === "samples") return samplesPage(query);
  if (name === "sample") return samplePage(Number(id), query);
  if (name === "search") return searchPage(query);
  if (name === "timeline") return timelinePage(query);
  if (name === "config") return configPage(query);
  if (name === "compare") return id ? comparePromptPage(Number(id), query) : comparePage(query);
  return overviewPage();
}

// [number of the run, path, query]
function addressParts() {
  const [whole, query] = (location.hash.slice(1) || "/").split("?");
  const [number, ...rest] = whole.split("/");
  return [runs[Number(number)] ? Number(number) : 0, `/${rest.join("/")}`, new URLSearchParams(query || "")];
}

let shownAddress = 0;
async function show(keepPlace = false) {
  const mine = ++shownAddress;
  const [number, path, query] = addressParts();
  run = runs[number];
  const main = document.querySelector("main");
  main.setAttribute("aria-busy", "true");
  const page = run.size || Object.keys(run.metrics).length || path === "/config" ? await pageFor(path, query) : element("p", { class: "note" }, "This run has no samples yet.", run.notes.map((note) => element("p", {}, note)));
  if (mine !== shownAddress) return;
  main.replaceChildren(page);
  main.setAttribute("aria-busy", "false");
  frame(path);
  if (keepPlace !== true) window.scrollTo(0, 0);
}

// The parts of the frame that depend on the address.
function frame(path) {
  document.querySelector("nav").replaceChildren(...[...TABS, ...(runs.length > 1 ? [["/compare", "Compare", "v"]] : [])].map(([address, text]) =>
    element("a", { href: to(address), "aria-current": path.replace(/^\/(step|group|prompt|sample)\/.*/, "/$1s").replace(/^(\/compare)\/.*/, "$1") === address && "page" }, text)));
  const kind = document.querySelector("#kind");
  kind.replaceChildren(shownText(`${run.format} · ${run.size.toLocaleString("en")} samples · ${trainedByStep().size || run.steps.length} steps`));
  const heading = document.querySelector("main h2");
  document.title = `${run.name}${heading ? `: ${heading.textContent}` : ""}`;
  const name = document.querySelector("h1");
  name.replaceChildren(runs.length > 1 ? choice("", runs.map((of, number) => [number, of.name]), run.number, (number) => { location.hash = to(path.split("/").length > 2 ? "/" : path, runs[number]); }) : shownText(run.name));
  name.querySelector("select")?.setAttribute("aria-label", "run");
}

function onKey(event) {
  if (event.target.matches("input, select, textarea") || event.ctrlKey || event.metaKey || event.altKey) return;
  const tab = TABS.find(([, , key]) => key === event.key);
  const [, path] = addressParts();
  const [, name, id] = path.split("/");
  const by = { j: 1, k: -1 }[event.key];
  if (tab) location.hash = to(tab[0]);
  else if (event.key === "v" && runs.length > 1) location.hash = to("/compare");
  else if (event.key === "/") { event.preventDefault(); document.querySelector("#search").focus(); }
  else if (by && name === "sample") location.hash = sampleAddress(clamped(Number(id) + by, run.size));
  else if (by && name === "group") location.hash = groupAddress(clamped(Number(id) + by, run.groups.length));
  else if (by && name === "prompt") location.hash = to(`/prompt/${clamped(Number(id) + by, run.prompts.length)}`);
  else if (by && name === "step") location.hash = to(`/step/${neighbour(Number(id), by)}`);
  else if (event.key === "u" && name === "sample") location.hash = groupAddress(run.groupOf[Number(id)]);
  else if (event.key === "u" && name === "group") location.hash = to(`/step/${run.groups[Number(id)].step}`);
}

function clamped(value, size) {
  return Math.max(0, Math.min(size - 1, value));
}

async function begin() {
  const app = document.querySelector("#app");
  try {
    await loadRuns();
  } catch (error) {
    app.append(element("p", { class: "finding" }, `This page cannot be read: ${error}. It needs a browser with DecompressionStream (2023 or later).`));
    return;
  }
  const search = element("input", { id: "search", type: "search", placeholder: "search texts  /", "aria-label": "search texts",
    onchange: (event) => { location.hash = to(`/search?q=${encodeURIComponent(event.target.value)}`); } });
  append(app, [
    element("header", { class: "top" }, element("h1", {}), element("span", { class: "hint", id: "kind" }), element("nav", { "aria-label": "pages" }), search),
    element("main", {}), element("footer", { class: "hint" }, KEYS_HELP)]);
  window.addEventListener("hashchange", show);
  window.addEventListener("keydown", onKey);
  await show();
  document.body.dataset.ready = "true";
  if (typeof follow === "function") follow();
}

begin();
