// Asks the server that sent the page for news of the run, and shows them where the reader is.

let shownEdition = document.body.dataset.edition;

async function follow() {
  const told = element("span", { class: "hint live", role: "status" }, "live");
  document.querySelector(".top").append(told);
  for (;;) {
    const begin = performance.now();
    try {
      const answer = await fetch(`news?seen=${encodeURIComponent(shownEdition)}`, { cache: "no-store" });
      if (answer.status === 200) await take(await answer.json());
      told.replaceChildren(shownText(answer.ok ? "live" : `the server answers ${answer.status}`));
    } catch {
      told.replaceChildren(shownText("the server is gone"));
    }
    await new Promise((wake) => { setTimeout(wake, Math.max(2000, 10 * (performance.now() - begin))); });
  }
}

async function take(news) {
  shownEdition = news.edition;
  const names = new Set(news.names);
  document.querySelectorAll("script[type='application/octet-stream']").forEach((part) => {
    if (part.id in news.parts || !names.has(part.id)) part.remove();
  });
  for (const [id, packed] of Object.entries(news.parts)) {
    const part = element("script", { type: "application/octet-stream", id });
    part.textContent = packed;
    document.body.append(part);
  }
  await loadRuns();
  await show(true);
}
