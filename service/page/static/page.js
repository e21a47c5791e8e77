// Asks for the page again when the event stream says that something has changed, or else now and then, and replaces
// what is different: while somebody looks. Without it the page is as it was made.
"use strict";
(() => {
  const LEAST_MS = 8000, MOST_MS = 30000;
  const main = document.getElementById("main"), live = document.getElementById("live");
  let timer = 0, asking = false, again = false, asked = Date.now(), source = null;

  const say = (text) => { if (live.textContent !== text) { live.textContent = text; live.dataset.on = text === "live"; } };
  const offerCopies = (root) => { for (const one of root.querySelectorAll(".copy")) one.hidden = !navigator.clipboard; };

  const drop = (node) => { const next = node.nextSibling; node.remove(); return next; };

  // Keeps the elements that are there, and so what is focused, selected, scrolled or opened; a row is known by its id.
  const merge = (old, made) => {
    for (const { name } of [...old.attributes]) if (!made.hasAttribute(name) && name !== "open") old.removeAttribute(name);
    for (const { name, value } of made.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
    let at = old.firstChild;
    for (const next of [...made.childNodes]) {
      const known = next.id ? document.getElementById(next.id) : at && !at.id ? at : null;
      if (!known || known.parentNode !== old || known.nodeName !== next.nodeName) { old.insertBefore(next, at); continue; }
      while (at && at !== known) at = drop(at);
      at = known.nextSibling;
      if (known instanceof Element) merge(known, next);
      else if (known.data !== next.data) known.data = next.data;
    }
    while (at) at = drop(at);
  };

  const ask = async () => {
    if (asking) return;
    asking = true;
    try {
      const answer = await fetch(location.href, { redirect: "manual", signal: AbortSignal.timeout(MOST_MS) });
      // The key has ended, the job is gone: what there is to say is a page.
      if (answer.type === "opaqueredirect" || answer.status === 403 || answer.status === 404) { location.reload(); return; }
      if (!answer.ok) throw new Error(String(answer.status));
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      // Of another version of the service: its script and style go with it.
      if (page.querySelector("script").src !== document.querySelector("script").src) { location.reload(); return; }
      const made = page.getElementById("main");
      offerCopies(made);
      merge(main, made);
      say("live");
      if (source && source.readyState === EventSource.CLOSED) look();
    } catch {
      say("not live");
    } finally {
      asking = false;
      asked = Date.now();
      askIn(again ? LEAST_MS : MOST_MS);
      again = false;
    }
  };

  const askIn = (wait) => { clearTimeout(timer); if (!document.hidden) timer = setTimeout(ask, wait); };
  const changed = () => { if (asking) again = true; else askIn(Math.max(0, asked + LEAST_MS - Date.now())); };

  const look = () => {
    if (source) source.close();
    source = null;
    clearTimeout(timer);
    if (document.hidden) return;
    askIn(Math.max(0, asked + MOST_MS - Date.now()));
    if (main.dataset.live !== "jobs") return;
    source = new EventSource("/ui/events");
    source.onmessage = changed;
  };

  document.addEventListener("click", async ({ target }) => {
    if (!target.matches(".copy")) return;
    await navigator.clipboard.writeText(target.previousElementSibling.textContent);
    target.textContent = "Copied";
    setTimeout(() => { target.textContent = "Copy"; }, 2000);
  });
  offerCopies(document);
  if (!("live" in main.dataset)) return;
  document.addEventListener("visibilitychange", look);
  window.addEventListener("pagehide", () => { if (source) source.close(); });
  look();
})();
