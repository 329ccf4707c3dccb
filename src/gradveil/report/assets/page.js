"use strict";
(() => {
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const data = (name) => JSON.parse(document.getElementById(name).textContent);
  // Text goes into the page by textContent alone: a name is shown, never read as HTML.
  const make = (name, options = {}, ...children) => {
    const made = Object.assign(document.createElement(name), options);
    made.append(...children);
    return made;
  };

  // Films: one slider for all of a run, each row with iterations of its own.
  for (const box of all(".film-box")) {
    const slider = box.querySelector(".time"), moment = box.querySelector(".moment");
    const play = box.querySelector(".play");
    const rows = all(".film-row", box).map((row) => ({
      films: all(".film:not(.lost)", row),
      steps: row.dataset.steps ? row.dataset.steps.split(" ").map(Number) : [],
    }));
    const moving = rows.filter((row) => row.steps.length);
    if (!moving.length) {
      box.querySelector(".slider").hidden = true;
      continue;
    }
    const show = () => {
      const share = slider.value / 100;
      for (const { films } of rows) {
        for (const film of films) {
          const frames = Number(film.style.getPropertyValue("--frames"));
          const last = Math.max(frames - 1, 1);
          film.style.setProperty("--at", Math.round(share * last) / last);
        }
      }
      const { steps } = moving[0];
      const index = Math.round(share * steps.length);
      moment.textContent = index < steps.length
        ? `iteration ${steps[index].toLocaleString("en")}` : "the result";
      slider.setAttribute("aria-valuetext", moment.textContent);
    };
    slider.addEventListener("input", show);
    let timer = null;
    const stop = () => {
      clearInterval(timer);
      timer = null;
      play.textContent = "Play";
    };
    play.addEventListener("click", () => {
      if (timer) return stop();
      if (Number(slider.value) >= 100) slider.value = 0;
      play.textContent = "Stop";
      show();
      timer = setInterval(() => {
        slider.value = Number(slider.value) + 100 / moving[0].steps.length;
        show();
        if (Number(slider.value) >= 100) stop();
      }, 350);
      return undefined;
    });
    show();
  }

  // The gallery: cards of one case at a time, made when they are asked for.
  const gallery = document.getElementById("gallery");
  let choose = () => {};
  if (gallery) {
    const { originals, cases } = data("gallery-data");
    const there = cases.filter((entry) => entry.images.length);
    const select = make("select", { id: "case" });
    there.forEach((entry, index) => select.append(make("option", { value: index }, entry.name)));
    const only = make("input", { type: "checkbox", id: "only" });
    const count = make("span", { className: "count" });
    const cards = make("div", { className: "cards" });
    const more = make("button", { type: "button", className: "more" }, "Show more");
    const FIRST = innerWidth < 600 ? 4 : 12;
    let shown = FIRST;
    const picture = (src, alt) => src
      ? make("img", { src, alt, className: "pixels", decoding: "async" })
      : make("div", { className: "lost" });
    const cell = (name, src, alt, text, hit) => {
      const parts = [picture(src, alt), make("small", {}, name)];
      for (const line of text ? text.split(" · ") : []) {
        parts.push(make("small", { className: hit ? "hit" : "" }, line));
      }
      return make("div", {}, ...parts);
    };
    const card = (entry, image) => {
      const strip = make("div", { className: "strip" });
      const original = originals[image.key];
      strip.append(cell("private picture", original, `original of image ${image.image}, ${image.class}`));
      if (image.used) strip.append(cell("as used", image.used, `image ${image.image} as used`));
      entry.attacks.forEach((attack, index) => {
        const { src, text, hit } = image.found[index];
        strip.append(cell(attack, src, `image ${image.image} by ${attack}: ${text}`, text, hit));
      });
      const made = make("figure", { className: "card" });
      strip.dataset.count = strip.children.length;
      made.append(make("figcaption", {}, `image ${image.image}, class ${image.class}`), strip);
      return made;
    };
    const draw = () => {
      const entry = there[Number(select.value)];
      const wanted = entry.images.filter((i) => !only.checked || i.found.some((f) => f.hit));
      cards.replaceChildren(...wanted.slice(0, shown).map((image) => card(entry, image)));
      more.hidden = wanted.length <= shown;
      const kept = entry.images.length < entry.total
        ? `; the page holds the worst ${entry.images.length} of ${entry.total}` : "";
      count.textContent = `${Math.min(shown, wanted.length)} of ${wanted.length} shown${kept}`;
    };
    choose = (id) => {
      const index = there.findIndex((entry) => entry.id === id);
      if (index < 0) return;
      select.value = index;
      shown = FIRST;
      draw();
      gallery.scrollIntoView();
    };
    select.addEventListener("change", () => { shown = FIRST; draw(); });
    only.addEventListener("change", draw);
    more.addEventListener("click", () => { shown += 48; draw(); });
    gallery.append(
      make("div", { className: "tools" }, make("label", {}, "Defense ", select),
        make("label", {}, only, " recognized only"), count),
      cards, more,
    );
    draw();
  }

  // Tips at points and meters, by pointer and by keyboard.
  const tip = document.getElementById("tip");
  const tell = (target) => {
    tip.textContent = target.dataset.tip;
    tip.hidden = false;
    const box = target.getBoundingClientRect(), own = tip.getBoundingClientRect();
    const left = Math.min(Math.max(8, box.left + box.width / 2 - own.width / 2),
      document.documentElement.clientWidth - own.width - 8);
    const above = box.top - own.height - 8;
    tip.style.left = `${left}px`;
    tip.style.top = `${above > 4 ? above : box.bottom + 8}px`;
  };
  const hide = () => { tip.hidden = true; };
  for (const target of all("[data-tip]")) {
    target.addEventListener("pointerenter", () => tell(target));
    target.addEventListener("pointermove", () => { if (tip.hidden) tell(target); });
    target.addEventListener("pointerleave", hide);
    target.addEventListener("focus", () => tell(target));
    target.addEventListener("blur", hide);
    if (target.dataset.case) target.addEventListener("click", () => choose(target.dataset.case));
  }
  addEventListener("scroll", hide, { passive: true });
  addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });

  // The table: sorted by a click on a head, filtered by words and by kind.
  const table = document.getElementById("rows"), body = table.tBodies[0];
  const value = (row, index) => {
    const { value: text } = row.cells[index].dataset;
    return text === undefined || text === "" ? null : text;
  };
  all("th", table).forEach((head, index) => {
    head.querySelector("button").addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      all("th", table).forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const rows = [...body.rows].map((row) => [value(row, index), row]);
      const known = rows.filter(([key]) => key !== null);
      const numbers = known.every(([key]) => Number.isFinite(Number(key)));
      known.sort(([a], [b]) => (numbers ? a - b : a.localeCompare(b)) * (down ? -1 : 1));
      const unknown = rows.filter(([key]) => key === null);
      body.append(...[...known, ...unknown].map(([, row]) => row));
    });
  });
  const words = document.getElementById("filter"), kinds = document.getElementById("kinds");
  const filter = () => {
    const wanted = words.value.toLowerCase().split(/\s+/).filter(Boolean);
    let count = 0;
    for (const row of body.rows) {
      const text = row.textContent.toLowerCase();
      const fits = wanted.every((word) => text.includes(word))
        && (!kinds.value || row.dataset.kind === kinds.value);
      row.hidden = !fits;
      count += fits;
    }
    document.getElementById("count").textContent = `${count} of ${body.rows.length} rows`;
  };
  words.addEventListener("input", filter);
  kinds.addEventListener("change", filter);

  // Downloads and the command.
  const saved = data("files-data");
  for (const button of all(".save")) {
    button.addEventListener("click", () => {
      const content = saved[button.dataset.file];
      const text = typeof content === "string" ? content : JSON.stringify(content, null, 1);
      const url = URL.createObjectURL(new Blob([text], { type: "text/plain" }));
      const link = make("a", { href: url, download: button.dataset.file });
      link.click();
      setTimeout(() => URL.revokeObjectURL(url), 1000);
    });
  }
  for (const button of all(".copy")) {
    button.addEventListener("click", async () => {
      const text = button.parentElement.querySelector("pre").textContent;
      try {
        await navigator.clipboard.writeText(text);
        button.textContent = "Copied";
      } catch {
        getSelection().selectAllChildren(button.parentElement.querySelector("pre"));
      }
    });
  }
})();
