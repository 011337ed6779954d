// The slices of a case: every control changes the picture at once. Without this script the form does the same.
const viewer = document.getElementById("viewer");
const form = document.getElementById("controls");
const picture = document.getElementById("slice");
const key = viewer.dataset.key;
const fields = form.elements;
const USUAL_OPACITY = "0.7";

const chosen = (name) => fields[name].selectedOptions[0];

function style() {
  const values = new URLSearchParams();
  for (const name of ["low", "high"]) {
    if (fields[name] && fields[name].value !== "") values.set(name, fields[name].value);
  }
  values.set("threshold", fields.threshold.value);
  if (fields.opacity.value !== USUAL_OPACITY) values.set("opacity", fields.opacity.value);
  return values;
}

function address(layer, extra = {}) {
  const values = style();
  for (const [name, value] of Object.entries(extra)) values.set(name, value);
  const query = values.toString();
  return `/v1/cases/${key}/slices/${layer}/${fields.axis.value}/${fields.index.value}.png${query ? `?${query}` : ""}`;
}

// While one picture is under way only the newest wish is kept, so a quick hand on the slider does not queue hundreds.
let underway = false;
let wished = null;

function load(source) {
  if (underway) { wished = source; return; }
  if (picture.getAttribute("src") === source) return;
  underway = true;
  const next = new Image();
  const finish = (well) => {
    underway = false;
    if (well) picture.src = source;
    if (wished !== null) { const newest = wished; wished = null; load(newest); }
  };
  next.addEventListener("load", () => finish(true));
  next.addEventListener("error", () => finish(false));
  next.src = source;
}

function windowProblem() {
  if (!fields.low) return "";
  const usual = (field) => Number(field.value === "" ? field.placeholder : field.value);
  return usual(fields.low) < usual(fields.high) ? "" : "The window has to rise: `from` below `to`.";
}

let later = 0;
function showThumbnails() {
  clearTimeout(later);
  later = setTimeout(() => {
    for (const link of viewer.querySelectorAll(".thumbnails a")) {
      link.querySelector("img").src = address(link.dataset.layer, { size: viewer.dataset.thumbnail });
    }
  }, 250);
}

function say() {
  const [layer, plane] = [chosen("layer"), chosen("axis")];
  const number = `${Number(fields.index.value) + 1} of ${plane.dataset.slices}`;
  const words = `${layer.dataset.title}, ${plane.dataset.name} slice ${number}`;
  document.getElementById("where").textContent = words;
  picture.alt = words;
  document.getElementById("slice-number").textContent = number;
  document.getElementById("threshold-number").textContent = `${Math.round(100 * fields.threshold.value)} %`;
  document.getElementById("opacity-number").textContent = `${Math.round(100 * fields.opacity.value)} %`;
  document.getElementById("edges").textContent = plane.dataset.edges
    ? `Radiological convention: ${plane.dataset.edges}.` : "The geometry is unknown: shown as the array lies.";
  document.getElementById("legend-share").hidden = layer.dataset.kind !== "share";
  document.getElementById("legend-labels").hidden = layer.dataset.kind !== "labels";
  for (const entry of viewer.querySelectorAll("[data-only]")) entry.hidden = entry.dataset.only !== fields.layer.value;
  for (const name of ["threshold", "opacity"]) fields[name].disabled = layer.dataset.kind !== "share";
  for (const link of viewer.querySelectorAll(".thumbnails a")) {
    if (link.dataset.layer === fields.layer.value) link.setAttribute("aria-current", "true");
    else link.removeAttribute("aria-current");
  }
}

function show() {
  const problem = windowProblem();
  const place = document.getElementById("window-problem");
  if (place) place.textContent = problem;
  say();
  if (problem) return;
  load(address(fields.layer.value));
  showThumbnails();
  const values = style();
  for (const name of ["layer", "axis", "index"]) values.set(name, fields[name].value);
  history.replaceState(null, "", `${location.pathname}?${values}`);
  viewer.dispatchEvent(new Event("shown"));
}

function step(by) {
  const to = Number(fields.index.value) + by;
  fields.index.value = Math.min(Math.max(to, 0), Number(fields.index.max));
  show();
}

fields.axis.addEventListener("change", () => {
  fields.index.max = Number(chosen("axis").dataset.slices) - 1;
  fields.index.value = chosen("axis").dataset.first;
  show();
});
fields.layer.addEventListener("change", show);
for (const name of ["index", "threshold", "opacity", "low", "high"]) {
  if (fields[name]) fields[name].addEventListener("input", show);
}
form.addEventListener("submit", (event) => { event.preventDefault(); show(); });

const STEPS = { ArrowUp: 1, ArrowRight: 1, ArrowDown: -1, ArrowLeft: -1, PageUp: 10, PageDown: -10 };
document.getElementById("frame").addEventListener("keydown", (event) => {
  if (!(event.key in STEPS) || event.ctrlKey || event.altKey || event.metaKey) return;
  event.preventDefault();
  step(STEPS[event.key]);
});
for (const link of viewer.querySelectorAll(".thumbnails a")) {
  link.addEventListener("click", (event) => {
    if (event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    fields.layer.value = link.dataset.layer;
    show();
  });
}
// The script replaces the button and the links to neighbouring slices.
document.getElementById("show").hidden = true;
form.querySelector(".steps").hidden = true;
say();

const volume = document.getElementById("volume");
if (volume && "WebGL2RenderingContext" in window) {
  volume.hidden = false;
  volume.addEventListener("click", async () => {
    const { toggleVolume } = await import("/static/volume.js");
    await toggleVolume(volume, viewer, form);
  });
}
