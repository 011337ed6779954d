// A job followed to its end: the server sends every change, and the page is asked for anew when there are results.
import { FINISHED, showJob } from "/static/live.js";

const EVERY_MS = 5000;
const root = document.getElementById("job");
const address = `/v1/jobs/${root.dataset.job}`;

function follow() {
  const events = new EventSource(`${address}/events`);
  const show = (event) => showJob(root, JSON.parse(event.data));
  events.addEventListener("job", show);
  events.addEventListener("end", (event) => {
    show(event);
    events.close();
    location.reload();
  });
  events.addEventListener("error", () => {
    // A connection that broke is tried again by the browser; one that was refused (too many are open) is not.
    if (events.readyState === EventSource.CLOSED) setTimeout(ask, EVERY_MS);
  });
}

async function ask() {
  try {
    const answer = await fetch(address);
    if (answer.ok) {
      const job = await answer.json();
      showJob(root, job);
      if (FINISHED.includes(job.state)) { location.reload(); return; }
    }
  } catch {
    // The server may be starting again.
  }
  setTimeout(ask, EVERY_MS);
}

if (!FINISHED.includes(root.dataset.state)) follow();
