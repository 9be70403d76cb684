// Everything works without this file. With it: rows come in live, the theme is remembered, "/" searches.
(function () {
  "use strict";
  var root = document.documentElement;
  var stored = null;
  try { stored = localStorage.getItem("theme"); } catch (error) { /* Private mode: not remembered. */ }
  if (stored === "light" || stored === "dark") root.dataset.theme = stored;

  document.addEventListener("DOMContentLoaded", function () {
    theme();
    keys();
    copies(document);
    live();
  });

  function theme() {
    var button = document.querySelector(".theme");
    if (!button) return;
    button.hidden = false;
    button.addEventListener("click", function () {
      var dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
      root.dataset.theme = dark ? "light" : "dark";
      try { localStorage.setItem("theme", root.dataset.theme); } catch (error) { /* Not remembered. */ }
    });
  }

  function keys() {
    document.addEventListener("keydown", function (event) {
      var typing = /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName);
      if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey && !event.altKey) {
        event.preventDefault();
        document.querySelector(".search input").focus();
      }
    });
  }

  function copies(within) {
    if (!navigator.clipboard) return;
    within.querySelectorAll("[data-copy]").forEach(function (element) {
      var text = element.textContent.trim();
      var button = document.createElement("button");
      button.type = "button";
      button.className = "copy";
      button.textContent = "copy";
      button.setAttribute("aria-label", "Copy " + text);
      button.addEventListener("click", function () {
        navigator.clipboard.writeText(text).then(function () {
          button.textContent = "copied";
          setTimeout(function () { button.textContent = "copy"; }, 1500);
        });
      });
      element.append(button);
    });
  }

  // The server draws; we only ask it again when the stream says that something happened.
  function live() {
    var table = document.querySelector("table[data-live]");
    var due = null;
    var waiting = null;
    var bar = null;
    if (document.getElementById("ops")) setInterval(refresh, 5000);
    if (!table || !window.EventSource) return;
    var source = new EventSource("/v1/stream?" + table.dataset.live);
    source.addEventListener("transfer", soon);
    source.addEventListener("finality", soon);
    source.addEventListener("retracted", function (event) {
      var id = JSON.parse(event.data).event_id;
      var row = table.querySelector(named(id));
      if (row) strike(row);
      soon();
    });
    addEventListener("pagehide", function () { source.close(); });

    function soon() {
      if (due === null) due = setTimeout(function () { due = null; refresh(); }, 700);
    }

    function refresh() {
      if (document.hidden) { document.addEventListener("visibilitychange", soon, { once: true }); return; }
      fetch(location.href, { headers: { accept: "text/html" } }).then(function (answer) {
        if (!answer.ok) throw new Error("status " + answer.status);
        return answer.text();
      }).then(function (text) {
        var fresh = new DOMParser().parseFromString(text, "text/html");
        parts(fresh);
        if (table) rows(fresh.getElementById("rows"));
      }).catch(function () { /* The next event asks again. */ });
    }

    function rows(body) {
      if (!body) return;
      var old = document.getElementById("rows");
      var known = new Set();
      old.querySelectorAll("tr[data-event]").forEach(function (row) { known.add(row.dataset.event); });
      var added = [];
      body.querySelectorAll("tr[data-event]").forEach(function (row) {
        if (!known.has(row.dataset.event)) added.push(row);
      });
      // What is being read does not move: badges change in place, new rows wait behind the bar.
      if (added.length && table.getBoundingClientRect().top < -40) {
        body.querySelectorAll("tr[data-event]").forEach(function (row) {
          var mine = old.querySelector(named(row.dataset.event));
          if (mine) { mine.className = row.className; mine.lastElementChild.replaceChildren.apply(mine.lastElementChild, row.lastElementChild.childNodes); }
        });
        waiting = body;
        announce(added.length);
        return;
      }
      place(body, added);
    }

    function place(body, added) {
      var old = document.getElementById("rows");
      // A row that a reorg took away under our eyes stays, struck through, above the row it stood above.
      var kept = Array.from(old.querySelectorAll("tr[data-kept]")).filter(function (row) {
        return !body.querySelector(named(row.dataset.event));
      }).map(function (row) {
        var next = row.nextElementSibling;
        while (next && (!next.dataset.event || next.dataset.kept)) next = next.nextElementSibling;
        return { row: row, above: next && next.dataset.event };
      });
      added.forEach(function (row) { row.classList.add("fresh"); });
      var adopted = document.adoptNode(body);
      old.replaceWith(adopted);
      kept.slice(0, 20).forEach(function (one) {
        var next = one.above && adopted.querySelector(named(one.above));
        if (next) next.before(one.row);
      });
      if (bar) { bar.remove(); bar = null; waiting = null; }
    }

    function announce(count) {
      if (!bar) {
        bar = document.createElement("div");
        bar.className = "newbar";
        bar.setAttribute("role", "status");
        var button = document.createElement("button");
        button.type = "button";
        button.addEventListener("click", function () {
          place(waiting, []);
          table.scrollIntoView({ block: "start" });
        });
        bar.append(button);
        table.before(bar);
      }
      bar.firstChild.textContent = count + " new";
    }

    function named(id) {
      return 'tr[data-event="' + CSS.escape(id) + '"]';
    }

    function strike(row) {
      row.dataset.kept = "1";
      row.className = "gone";
      var badge = row.querySelector(".badge");
      badge.className = "badge gone";
      badge.textContent = "reverted";
    }

    function parts(fresh) {
      document.querySelectorAll("[data-part]").forEach(function (mine) {
        var next = fresh.getElementById(mine.id);
        if (next && !mine.contains(document.activeElement)) mine.replaceChildren.apply(mine, Array.from(next.childNodes));
      });
    }
  }
})();
