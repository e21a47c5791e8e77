// Refreshes numbers in place from the event stream while the page is looked at. Without it the page is as it was made.
"use strict";
(() => {
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const shown = all("[data-job]"), live = document.getElementById("live");
  const RETRY_MS = 15000;
  let source = null, retry = 0;

  const say = (text) => { if (live) { live.textContent = text; live.dataset.on = text === "live"; } };

  const put = (element, words) => {
    const text = words[element.dataset.live];
    if (text === undefined) return;
    if (element instanceof HTMLProgressElement) element.value = Number(text);
    else if (element.textContent !== text) element.textContent = text;
    if (element.dataset.state !== undefined) element.dataset.state = text;
  };

  const take = (message) => {
    for (const [id, words] of Object.entries(JSON.parse(message.data))) {
      for (const root of shown.filter((one) => one.dataset.job === id)) {
        // A job in another state has other commands and reasons: the service says which.
        if (root.dataset.reload && root.dataset.reload !== words.state) { location.reload(); return; }
        for (const element of all("[data-live]", root)) put(element, words);
      }
    }
  };

  const close = () => { clearTimeout(retry); if (source) source.close(); source = null; };

  const open = () => {
    close();
    if (!shown.length || document.hidden) return;
    const query = new URLSearchParams(shown.map((one) => ["job", one.dataset.job]));
    source = new EventSource(`/ui/events?${query}`);
    source.onopen = () => say("live");
    source.onmessage = take;
    source.onerror = () => {
      say("not live");
      // The browser itself comes back after an end, but not after a refusal.
      if (source.readyState === EventSource.CLOSED) retry = setTimeout(open, RETRY_MS);
    };
  };

  const AGES = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
  const age = () => {
    for (const element of all("time[datetime]:not([data-fixed])")) {
      const passed = (Date.now() - Date.parse(element.dateTime)) / 1000;
      const [length, unit] = AGES.find(([length]) => Math.abs(passed) >= length) || [1, "s"];
      const text = `${Math.floor(Math.abs(passed) / length)} ${unit}`;
      element.textContent = passed >= 0 ? `${text} ago` : `in ${text}`;
    }
  };

  const copying = (button) => {
    button.hidden = !navigator.clipboard;
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(button.previousElementSibling.textContent);
      button.textContent = "Copied";
      setTimeout(() => { button.textContent = "Copy"; }, 2000);
    });
  };

  all(".copy").forEach(copying);
  document.addEventListener("visibilitychange", () => (document.hidden ? close() : open()));
  window.addEventListener("pagehide", close);
  setInterval(age, 10000);
  open();
})();
