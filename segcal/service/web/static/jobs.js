// The list of jobs, kept current by one small request every few seconds. Not by event streams: a browser opens six
// connections to a server at most, over all of its tabs, and a list of streams would block every other page.
import { FINISHED, showJob } from "/static/live.js";

const EVERY_MS = 3000;
const open = () => Array.from(document.querySelectorAll("#jobs tr[data-job]"))
  .filter((row) => !FINISHED.includes(row.dataset.state));

async function asked(address) {
  const answer = await fetch(address);
  return answer.ok ? answer.json() : null;
}

async function update() {
  if (document.hidden || !open().length) return;
  const given = new URLSearchParams(location.search);
  const query = new URLSearchParams({ limit: "100" });
  for (const name of ["kind", "batch", "before"]) {
    if (given.get(name)) query.set(name, given.get(name));
  }
  const page = await asked(`/v1/jobs?${query}`);
  const known = new Map((page ? page.jobs : []).map((job) => [job.id, job]));
  for (const row of open()) {
    // Jobs that newer ones pushed off the page are few; running ones among them are asked for one by one.
    const running = row.dataset.state === "running";
    const job = known.get(row.dataset.job) ?? (running ? await asked(`/v1/jobs/${row.dataset.job}`) : null);
    if (job) showJob(row, job);
  }
  for (const [state, number] of Object.entries((await asked("/v1/jobs/counts")) ?? {})) {
    const place = document.querySelector(`[data-count="${state}"]`);
    if (place) place.textContent = number;
  }
}

if (open().length) setInterval(() => update().catch(() => {}), EVERY_MS);
