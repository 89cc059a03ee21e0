// Addresses, keys, and the frame around every page.

const TABS = [["#/", "Overview", "o"], ["#/steps", "Steps", "s"], ["#/groups", "Groups", "g"], ["#/prompts", "Prompts", "p"]];
const KEYS_HELP = "o s g p: pages · j k: next and previous sample or step · u: up to the group · /: search";

function pageFor(path, query) {
  const [, name, id] = path.split("/");
  if (name === "steps") return stepsPage();
  if (name === "step") return stepPage(Number(id));
  if (name === "groups") return groupsPage(query);
  if (name === "group") return groupPage(Number(id));
  if (name === "prompts") return promptsPage(query);
  if (name === "sample") return samplePage(Number(id), query);
  if (name === "search") return searchPage(query);
  return overviewPage();
}

function addressParts() {
  const [path, query] = (location.hash.slice(1) || "/").split("?");
  return [path, new URLSearchParams(query || "")];
}

let shownAddress = 0;
async function show() {
  const mine = ++shownAddress;
  const [path, query] = addressParts();
  const main = document.querySelector("main");
  main.setAttribute("aria-busy", "true");
  const page = await pageFor(path, query);
  if (mine !== shownAddress) return;
  main.replaceChildren(page);
  main.setAttribute("aria-busy", "false");
  document.querySelectorAll("nav a").forEach((tab) => {
    if (tab.getAttribute("href") === `#${path}`) tab.setAttribute("aria-current", "page");
    else tab.removeAttribute("aria-current");
  });
  window.scrollTo(0, 0);
}

function onKey(event) {
  if (event.target.matches("input, select, textarea") || event.ctrlKey || event.metaKey || event.altKey) return;
  const tab = TABS.find(([, , key]) => key === event.key);
  const [path] = addressParts();
  const [, name, id] = path.split("/");
  if (tab) location.hash = tab[0];
  else if (event.key === "/") { event.preventDefault(); document.querySelector("#search").focus(); }
  else if ("jk".includes(event.key) && name === "sample") location.hash = sampleAddress(clamped(Number(id) + (event.key === "j" ? 1 : -1), run.size));
  else if ("jk".includes(event.key) && name === "group") location.hash = groupAddress(clamped(Number(id) + (event.key === "j" ? 1 : -1), run.groups.length));
  else if ("jk".includes(event.key) && name === "step") location.hash = `#/step/${neighbour(Number(id), event.key === "j" ? 1 : -1)}`;
  else if (event.key === "u" && name === "sample") location.hash = groupAddress(run.groupOf[Number(id)]);
}

function clamped(value, size) {
  return Math.max(0, Math.min(size - 1, value));
}

async function begin() {
  const app = document.querySelector("#app");
  try {
    await loadRun();
  } catch (error) {
    app.append(element("p", { class: "finding" }, `This page cannot be read: ${error}. It needs a browser with DecompressionStream (2023 or later).`));
    return;
  }
  const search = element("input", { id: "search", type: "search", placeholder: "search texts", "aria-label": "search texts",
    onchange: (event) => { location.hash = `#/search?q=${encodeURIComponent(event.target.value)}`; } });
  append(app, [
    element("header", { class: "top" }, element("h1", {}, run.name), element("span", { class: "hint" }, `${run.format} · ${run.size} samples · ${run.steps.length} steps`),
      element("nav", { "aria-label": "pages" }, TABS.map(([address, text]) => link(address, text))), search),
    element("main", {}), element("footer", { class: "hint" }, KEYS_HELP)]);
  window.addEventListener("hashchange", show);
  window.addEventListener("keydown", onKey);
  await show();
  document.body.dataset.ready = "true";
}

begin();
