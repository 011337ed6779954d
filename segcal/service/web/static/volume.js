// The volume in the browser, by NiiVue: three planes and a rendering of the chosen layer over the image.
// Loaded only when somebody asks for it; the slices drawn by the server stay as they are.
import { Niivue, SHOW_RENDER } from "/static/niivue/niivue.js";

const TRANSPARENT_BELOW_MIN = 1; // NiiVue's COLORMAP_TYPE.ZERO_TO_MAX_TRANSPARENT_BELOW_MIN, which it does not export
let shown = null;

export async function toggleVolume(button, viewer, form) {
  const stage = document.getElementById("volume-stage");
  stage.hidden = !stage.hidden;
  button.textContent = stage.hidden ? "3-D viewer" : "Close the 3-D viewer";
  if (stage.hidden) return;
  if (shown === null) {
    shown = start(viewer, form);
    viewer.addEventListener("shown", () => shown.then((update) => update()).catch(tell));
  }
  await shown.then((update) => update()).catch(tell);
}

function tell(problem) {
  document.getElementById("volume-words").textContent = `The 3-D viewer cannot show this: ${problem.message}`;
}

async function start(viewer, form) {
  const canvas = document.getElementById("volume-canvas");
  const niivue = new Niivue({
    backColor: [0, 0, 0, 1],
    crosshairWidth: 0.3,
    dragAndDropEnabled: false,
    isRadiologicalConvention: true,
    logLevel: "error",
    sagittalNoseLeft: true, // as the server's slices
    multiplanarShowRender: SHOW_RENDER.ALWAYS,
    show3Dcrosshair: true,
  });
  await niivue.attachToCanvas(canvas);
  niivue.setSliceType(niivue.sliceTypeMultiplanar);
  const address = (layer) => `/v1/cases/${viewer.dataset.key}/layers/${layer}.nii.gz`;
  const image = viewer.dataset.image;
  let loaded = "";

  async function update() {
    if (document.getElementById("volume-stage").hidden) return;
    const option = form.elements.layer.selectedOptions[0];
    if (loaded !== option.value) {
      loaded = option.value;
      const list = image ? [{ url: address(image), colormap: "gray" }] : [];
      if (option.value !== image) list.push({ url: address(option.value), colormap: image ? "cividis" : "gray" });
      await niivue.loadVolumes(list);
    }
    dress(niivue, option, image, form, viewer);
    place(niivue, form);
    const words = `${option.dataset.title}, three planes and a rendering; drag in a plane to move.`;
    document.getElementById("volume-words").textContent = words;
    canvas.dataset.layer = option.value;
  }
  return update;
}

function dress(niivue, option, image, form, viewer) {
  const number = (name) => {
    const field = form.elements[name];
    return Number(field.value === "" ? field.placeholder : field.value);
  };
  if (image) {
    niivue.volumes[0].cal_min = number("low");
    niivue.volumes[0].cal_max = number("high");
  }
  const layer = niivue.volumes.at(-1);
  if (option.dataset.kind === "labels") {
    layer.setColormapLabel(labelColours(viewer));
    layer.opacity = image ? 0.6 : 1;
  } else if (option.dataset.kind === "share") {
    // From 0 to 1 as in the slices, nothing below the threshold; NiiVue takes 0 for "no threshold".
    layer.colormapType = TRANSPARENT_BELOW_MIN;
    layer.cal_min = Math.max(0.002, Number(form.elements.threshold.value));
    layer.cal_max = 1;
    layer.opacity = Number(form.elements.opacity.value);
  }
  niivue.updateGLVolume();
}

function labelColours(viewer) {
  const map = { R: [0], G: [0], B: [0], A: [0], I: [0], labels: [""] };
  for (const entry of viewer.querySelectorAll("#legend-labels li")) {
    const hex = entry.querySelector("rect").getAttribute("fill");
    const [red, green, blue] = [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
    map.R.push(red); map.G.push(green); map.B.push(blue); map.A.push(255);
    map.I.push(Number(entry.dataset.value)); map.labels.push(entry.textContent.trim());
  }
  return map;
}

function place(niivue, form) {
  const at = {};
  for (const plane of form.elements.axis.options) at[plane.value] = Number(plane.dataset.first);
  at[form.elements.axis.value] = Number(form.elements.index.value);
  niivue.scene.crosshairPos = niivue.vox2frac([at.x, at.y, at.z]);
  niivue.drawScene();
}
