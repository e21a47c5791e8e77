// Asks for the page again while somebody looks, and replaces what has changed. Without it the page is as it was made.
"use strict";
(() => {
  const EVERY_MS = 3000, RETRY_MS = 15000;
  const main = document.getElementById("main"), live = document.getElementById("live");
  let timer = 0, asking = false;

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
    let wait = RETRY_MS;
    asking = true;
    clearTimeout(timer);
    try {
      const answer = await fetch(location.href, { redirect: "manual" });
      // The key has ended, the job is gone: what there is to say is a page.
      if (answer.type === "opaqueredirect" || answer.status === 403 || answer.status === 404) { location.reload(); return; }
      if (!answer.ok) throw new Error(String(answer.status));
      const made = new DOMParser().parseFromString(await answer.text(), "text/html").getElementById("main");
      offerCopies(made);
      merge(main, made);
      say("live");
      wait = EVERY_MS;
    } catch {
      say("not live");
    } finally {
      asking = false;
      if (!document.hidden) timer = setTimeout(ask, wait);
    }
  };

  document.addEventListener("click", async ({ target }) => {
    if (!target.matches(".copy")) return;
    await navigator.clipboard.writeText(target.previousElementSibling.textContent);
    target.textContent = "Copied";
    setTimeout(() => { target.textContent = "Copy"; }, 2000);
  });
  offerCopies(document);
  if (!("live" in main.dataset)) return;
  document.addEventListener("visibilitychange", () => (document.hidden ? clearTimeout(timer) : ask()));
  timer = setTimeout(ask, EVERY_MS);
})();
