"use strict";
(() => {
  const table = document.getElementById("board");
  const body = table.tBodies[0];
  const heads = [...table.tHead.rows[0].cells];
  const original = [...body.rows];
  const box = document.getElementById("filter");
  const count = document.getElementById("count");
  const words = (text) => text.toLowerCase().split(/\s+/).filter(Boolean);
  const texts = new Map(original.map((row) =>
    [row, [...row.cells].flatMap((cell) => [...cell.childNodes].map((node) => node.textContent)).join(" ").toLowerCase()]));

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
    if (!numeric) return cell.textContent === "—" ? null : cell.textContent;
    return cell.dataset.sort === undefined ? null : Number(cell.dataset.sort);
  };

  const sorted = (column, order) => {
    const numeric = heads[column].classList.contains("number");
    const sign = order === "descending" ? -1 : 1;
    return [...original].sort((left, right) => {
      const a = key(left, column, numeric), b = key(right, column, numeric);
      if (a === null || b === null) return (a === null) - (b === null); // unknown values stay last either way
      return sign * (numeric ? a - b : a.localeCompare(b, "en", { numeric: true }));
    });
  };

  const show = () => {
    const wanted = state();
    const order = wanted.get("order") === "descending" ? "descending" : "ascending";
    const column = heads.findIndex((head) => head.dataset.key === wanted.get("sort"));
    heads.forEach((head, index) => head.setAttribute("aria-sort", index === column ? order : "none"));
    body.append(...(column < 0 ? original : sorted(column, order)));
    const text = wanted.get("filter") || "";
    if (box.value !== text) box.value = text;
    const asked = words(text);
    let visible = 0;
    for (const row of original) {
      row.hidden = !asked.every((word) => texts.get(row).includes(word));
      if (!row.hidden) visible += 1;
    }
    count.textContent = asked.length ? `${visible} of ${original.length} rows` : `${original.length} rows`;
  };

  heads.forEach((head) => head.querySelector("button").addEventListener("click", () => {
    const now = head.getAttribute("aria-sort");
    const next = { none: "ascending", ascending: "descending", descending: "" }[now];
    go({ sort: next && head.dataset.key, order: next });
  }));
  box.addEventListener("input", () => go({ filter: box.value }));
  box.form.addEventListener("submit", (event) => event.preventDefault());
  window.addEventListener("hashchange", show);
  show();
})();
