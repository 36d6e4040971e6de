"use strict";
(() => {
  // What is under the pointer, or has the focus, says its own name: marks of plots carry one.
  const tip = document.createElement("div");
  tip.id = "tip";
  tip.hidden = true;
  tip.setAttribute("role", "tooltip");
  document.body.append(tip);
  const told = (node) => {
    const mark = node instanceof Element ? node.closest(".plot [aria-roledescription=point], .plot [aria-roledescription=circle]") : null;
    return mark ? mark.getAttribute("aria-label") : null;
  };
  const place = (x, y) => {
    tip.style.left = `${Math.max(4, Math.min(x + 12, innerWidth - tip.offsetWidth - 8))}px`;
    tip.style.top = `${y + 16 + tip.offsetHeight > innerHeight ? y - tip.offsetHeight - 8 : y + 16}px`;
  };
  document.addEventListener("pointermove", (event) => {
    const text = told(event.target);
    tip.hidden = !text;
    if (text) { tip.textContent = text; place(event.clientX, event.clientY); }
  });
  document.addEventListener("pointerleave", () => { tip.hidden = true; });

  const table = document.getElementById("board");
  if (!table) return;
  const FIRST = 300; // rows that are laid out before anybody asks for more
  const body = table.tBodies[0];
  const heads = [...table.tHead.rows[0].cells];
  const original = [...body.rows];
  const box = document.getElementById("filter");
  const count = document.getElementById("count");
  const more = document.getElementById("more");
  const choices = { model: document.getElementById("model"), pruned: document.getElementById("pruned") };
  const groups = [...document.querySelectorAll("[data-group]")];
  const at = { model: heads.findIndex((head) => head.dataset.key === "model"), pruned: heads.findIndex((head) => head.dataset.key === "ratio") };
  const words = (text) => text.toLowerCase().split(/\s+/).filter(Boolean);
  const texts = new Map();
  const textOf = (row) => {
    if (!texts.has(row)) texts.set(row, [...row.cells].map((cell) => cellText(cell)).join(" ").toLowerCase());
    return texts.get(row);
  };
  const cellText = (cell) => [...cell.childNodes].map((node) => node.textContent).join(" ");
  const mainText = (cell) => [...cell.childNodes].filter((node) => node.nodeName !== "SMALL").map((node) => node.textContent).join("");
  let all = false;

  // The state lives in the address, e.g. #sort=ratio&order=descending&filter=reap, so that a view can be linked.
  const state = () => new URLSearchParams(location.hash.slice(1));

  const go = (changes) => {
    const next = state();
    for (const [key, value] of Object.entries(changes)) {
      if (value) next.set(key, value); else next.delete(key);
    }
    location.replace("#" + (next.toString() || "order=default")); // a bare "#" would scroll to the top
  };

  const key = (row, column, numeric) => {
    const cell = row.cells[column];
    if (!numeric) return mainText(cell) === "—" ? null : cell.textContent;
    return cell.dataset.sort === undefined ? null : Number(cell.dataset.sort);
  };

  const sorted = (column, order) => {
    const numeric = heads[column].classList.contains("n");
    const sign = order === "descending" ? -1 : 1;
    const keys = new Map(original.map((row) => [row, key(row, column, numeric)]));
    return [...original].sort((left, right) => {
      const a = keys.get(left), b = keys.get(right);
      if (a === null || b === null) return (a === null) - (b === null); // unknown values stay last either way
      return sign * (numeric ? a - b : a.localeCompare(b, "en", { numeric: true }));
    });
  };

  let arranged = "";
  const show = () => {
    const wanted = state();
    const order = wanted.get("order") === "descending" ? "descending" : "ascending";
    const column = heads.findIndex((head) => head.dataset.key === wanted.get("sort"));
    heads.forEach((head, index) => head.setAttribute("aria-sort", index === column ? order : "none"));
    if (arranged !== `${column} ${order}` && (arranged || column >= 0)) {
      body.append(...(column < 0 ? original : sorted(column, order)));
    }
    arranged = `${column} ${order}`;
    const text = wanted.get("filter") || "";
    if (box.value !== text) box.value = text;
    const asked = words(text);
    const chosen = Object.keys(choices).filter((name) => {
      const value = wanted.get(name) || "";
      if (choices[name].value !== value) choices[name].value = value;
      return choices[name].value;
    });
    const off = (wanted.get("hide") || "").split(".");
    for (const group of groups) {
      group.checked = !off.includes(group.dataset.group);
      table.classList.toggle(`no-${group.dataset.group}`, !group.checked);
    }
    let visible = 0;
    for (const row of body.rows) {
      const fits = chosen.every((name) => (name === "model" ? cellText(row.cells[at[name]]).trim().replace(/\s+/g, " ") : mainText(row.cells[at[name]])) === choices[name].value);
      row.hidden = !(fits && asked.every((word) => textOf(row).includes(word)));
      if (!row.hidden) visible += 1;
      row.classList.toggle("past", !row.hidden && !all && visible > FIRST);
    }
    const some = asked.length || chosen.length;
    count.textContent = some ? `${visible} of ${original.length} rows` : `${original.length} rows`;
    more.hidden = all || visible <= FIRST;
    more.textContent = `Show all ${visible} (now ${FIRST})`;
  };

  heads.forEach((head) => head.querySelector("button").addEventListener("click", () => {
    const now = head.getAttribute("aria-sort");
    const next = { none: "ascending", ascending: "descending", descending: "" }[now];
    go({ sort: next && head.dataset.key, order: next });
  }));
  box.addEventListener("input", () => go({ filter: box.value }));
  for (const [name, choice] of Object.entries(choices)) choice.addEventListener("change", () => go({ [name]: choice.value }));
  for (const group of groups) {
    group.addEventListener("change", () => go({ hide: groups.filter((one) => !one.checked).map((one) => one.dataset.group).join(".") }));
  }
  const everything = () => { all = true; show(); };
  more.addEventListener("click", everything);
  window.addEventListener("beforeprint", everything);
  box.form.addEventListener("submit", (event) => event.preventDefault());
  window.addEventListener("hashchange", show);
  show();
})();
