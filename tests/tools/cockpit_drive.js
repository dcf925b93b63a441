"use strict";
// Uses the page in a real browser as a reader would, and leaves what it saw in the page's last element.
(() => {
  const root = document.getElementById("cockpit");
  const all = (css) => [...root.querySelectorAll(css)];
  const said = () => ({
    titles: all("h2").map((e) => e.textContent).filter((t) => t.includes("at most")),
    fits: all(".yes, .no").map((e) => e.textContent),
    chosen: all("tr.chosen td button").map((e) => e.textContent),
  });
  // Colours of a canvas that cover more than a few pixels.
  const colours = (canvas) => {
    const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    const seen = new Map();
    for (let i = 0; i < data.length; i += 4) {
      if (data[i + 3] < 255) continue;
      const colour = "#" + [...data.slice(i, i + 3)].map((c) => c.toString(16).padStart(2, "0")).join("");
      seen.set(colour, (seen.get(colour) || 0) + 1);
    }
    return [...seen].filter(([, count]) => count > 20).map(([colour]) => colour);
  };
  const charts = all("canvas:not(.map)");
  const slider = root.querySelector("input[type=range]");
  const seen = { start: said(), charts: charts.map(colours), switched: [], opened: performance.now() };
  if (slider) {
    const map = root.querySelector("canvas.map");
    slider.value = 0;
    for (let i = 0; i <= Number(slider.max); i++) {
      if (i) slider.stepUp();
      slider.dispatchEvent(new Event("input"));
      seen.switched.push({ ...said(), value: slider.getAttribute("aria-valuetext"), map: colours(map) });
    }
    all("tbody button")[0].click();
    seen.pressed = said().chosen;
  }
  charts[charts.length - 1].dispatchEvent(new MouseEvent("click", { clientX: 400, bubbles: true }));
  charts[charts.length - 1].dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight" }));
  seen.pinned = all("h2").map((e) => e.textContent).find((t) => t.includes("op "));
  seen.wide = document.documentElement.scrollWidth <= window.innerWidth;
  seen.asked = performance.getEntriesByType("resource").map((e) => e.name);
  const out = document.createElement("pre");
  out.id = "seen";
  out.textContent = JSON.stringify(seen);
  document.body.append(out);
})();
