/** The page of `verbatim view`: boot, the bar above every view, and the view that the link names. */
import { render } from "preact";
import { useEffect } from "preact/hooks";
import "uplot/dist/uPlot.min.css";
import "./style/base.css";
import "./style/views.css";
import "./style/tokens.css";
import { count, plural } from "./format";
import { useKeys } from "./hooks";
import { useRuns } from "./metrics";
import { Empty } from "./parts/empty";
import { newsOf } from "./parts/missing";
import { link, useRoute, type View } from "./route";
import { openSource } from "./source";
import { spelled } from "./visible";
import { useTheme, type Theme } from "./theme";
import { GroupPage } from "./views/group";
import { Overview } from "./views/overview";
import { Trajectories } from "./views/trajectories";
import { TrajectoryPage } from "./views/trajectory";
import { Text } from "./parts/text";

const source = openSource();
const THEMES: Theme[] = ["system", "light", "dark"];

function App() {
  const route = useRoute();
  const { runs, error } = useRuns(source);
  const { theme, choose } = useTheme();
  const names = runs?.map(({ run }) => run.name).join(", ") ?? "";
  useEffect(() => {
    document.title = spelled(`${route.view === "trajectory" || route.view === "group" ? `${route.id} · ` : ""}${names || "Verbatim"}`);
  }, [names, route.view, route.id]);
  useKeys({ o: () => { location.hash = link("overview", route.run); }, t: () => { location.hash = link("trajectories", route.run); } });
  const shown = runs?.find(({ run }) => run.id === route.run)?.run ?? runs?.[0]?.run;
  const at = (view: View) => (route.view === view || (view === "trajectories" && ["trajectory", "group"].includes(route.view)) ? "page" : undefined);
  return (
    <>
      <header class="bar">
        <a class="skip" href="#main" onClick={(event) => { event.preventDefault(); document.getElementById("main")?.focus(); }}>To the content</a>
        <span class="brand">Verbatim</span>
        <span class="run-names" title={spelled(names)}><Text value={names} /></span>
        <nav aria-label="Views">
          <a href={link("overview", route.run)} aria-current={at("overview")} title="key o">Overview</a>
          <a href={link("trajectories", route.run)} aria-current={at("trajectories")} title="key t">Trajectories</a>
        </nav>
        <span class="rest" />
        {!source.live && <span class="tag">{source.ofTotal === null ? "exported" : `${count(source.held)} of ${plural(source.ofTotal, "trajectory", "trajectories")}, exported`}</span>}
        {error && runs && <span class="tag error" role="alert">{error}</span>}
        <label class="theme" title="colours: as the system has them, light or dark">
          <span class="unseen">colours</span>
          <select value={theme} onChange={(event) => choose(event.currentTarget.value as Theme)}>
            {THEMES.map((each) => <option key={each} value={each}>{each}</option>)}
          </select>
        </label>
      </header>
      <main id="main" tabIndex={-1} class={route.view} data-testid={`view-${route.view}`}>
        {!runs && (error ? <Empty title="The run could not be read" why={error} /> : <p class="loading" role="status">Reading the run.</p>)}
        {runs && runs.length === 0 && <Empty title="No run" why="Start the page with the folder of a run: verbatim view RUN." />}
        {runs && runs.length > 0 && route.view === "overview" && <Overview source={source} runs={runs} route={route} />}
        {runs && runs.length > 0 && route.view === "trajectories" && <Trajectories source={source} runs={runs.map(({ run }) => run)} route={route} />}
        {shown && route.view === "trajectory" && <TrajectoryPage source={source} run={shown} news={newsOf(shown, error)} route={route} />}
        {shown && route.view === "group" && <GroupPage source={source} shown={shown} news={newsOf(shown, error)} route={route} />}
      </main>
    </>
  );
}

const root = document.getElementById("app");
if (root) {
  root.replaceChildren();
  render(<App />, root);
}
