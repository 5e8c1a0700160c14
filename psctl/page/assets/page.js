"use strict";
(() => {
  const given = JSON.parse(document.getElementById("data").textContent);
  const colours = 6;
  let page = given.page;
  let lost = false;

  // ---- elements: text is only ever set as text ----------------------------------------------------------------------

  function el(tag, attributes, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) {
      if (name === "on") for (const [event, act] of Object.entries(value)) made.addEventListener(event, act);
      else if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value);
    }
    made.append(...children.flat().filter((each) => each !== null && each !== undefined).map(
      (each) => each instanceof Node ? each : document.createTextNode(String(each))));
    return made;
  }
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
  const key = (name, text) => {
    const made = el("span", {class: "key"}, text);
    made.style.setProperty("--dot", colour(name));
    return made;
  };

  // ---- numbers --------------------------------------------------------------------------------------------------------

  const count = (value) => value === null || value === undefined ? "-" : Number(value.toPrecision(4)).toLocaleString("en-US",
    {maximumFractionDigits: 6});
  function bytes(value) {
    if (value === null || value === undefined) return "-";
    const units = ["B", "kB", "MB", "GB", "TB", "PB"];
    let index = 0;
    while (value >= 1000 && index < units.length - 1) { value /= 1000; index += 1; }
    return Number(value.toPrecision(3)) + " " + units[index];
  }
  function seconds(value) {
    if (value === null || value === undefined) return "-";
    if (value !== 0 && Math.abs(value) < 1e-3) return Number((value * 1e6).toPrecision(3)) + " us";
    if (Math.abs(value) < 1) return Number((value * 1e3).toPrecision(3)) + " ms";
    if (value < 120) return Number(value.toPrecision(3)) + " s";
    const whole = Math.round(value);
    const [h, m, s] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
    return h ? `${h}:${String(m).padStart(2, "0")}:${String(s).padStart(2, "0")}` : `${m}:${String(s).padStart(2, "0")}`;
  }
  const metric = (value) => value === null || value === undefined ? "-" :
    Math.abs(value) >= 1e6 || (value !== 0 && Math.abs(value) < 1e-4) ? value.toExponential(3) : count(value);

  // ---- charts ---------------------------------------------------------------------------------------------------------

  const choices = {axis: "step", log: false};
  const charts = new Map();

  function chart(id, title, lines, format, into, axisName) {
    const over = axisName || choices.axis;
    lines = lines.filter((line) => line.series && line.series.values.length);
    if (!lines.length) return;
    let held = charts.get(id);
    const shape = JSON.stringify([lines.map((line) => line.label), choices]);
    if (!held) {
      held = {figure: el("figure"), caption: el("figcaption"), box: el("div"), shape: "", plot: null};
      held.figure.append(held.caption, held.box);
      new ResizeObserver(() => fit(held)).observe(held.box);
      charts.set(id, held);
    }
    held.used = true;
    if (held.figure.parentNode !== into) into.append(held.figure);
    held.caption.replaceChildren(el("strong", {}, title), ...lines.map((line, index) =>
      key("s" + index % colours, `${line.label} ${format(line.series.values[line.series.values.length - 1])}`)));
    const clean = (value) => choices.log && value <= 0 ? null : value;
    const data = uPlot.join(lines.map((line) => [
      over === "step" ? line.series.steps : line.series.seconds, line.series.values.map(clean)]));
    if (held.shape === shape) {
      held.plot.setData(data);
      return;
    }
    if (held.plot) held.plot.destroy();
    held.shape = shape;
    const axis = {stroke: colour("dim"), grid: {stroke: colour("grid"), width: 1}, ticks: {stroke: colour("grid")}};
    const across = over === "step" ? count : seconds;
    held.plot = new uPlot({
      width: Math.max(200, held.box.clientWidth), height: 220, legend: {show: false}, cursor: {y: false},
      scales: {x: {time: false}, y: choices.log ? {distr: 3} : {}},
      axes: [{...axis, values: (_, splits) => splits.map((each) => each === null ? "" : across(each))},
        {...axis, size: 76, values: (_, splits) => splits.map((each) => each === null ? "" : format(each))}],
      series: [{}, ...lines.map((line, index) => ({
        label: line.label, stroke: colour("s" + index % colours), width: 1.75, spanGaps: true,
        points: {show: line.series.values.length === 1}}))],
      hooks: {setCursor: [(plot) => pointAt(plot, lines, over, across, format)]},
    }, data, held.box);
    held.plot.over.addEventListener("mouseleave", hideTip);
  }

  function fit(held) {
    const width = Math.max(200, held.box.clientWidth);
    if (held.plot && held.plot.width !== width) held.plot.setSize({width, height: held.plot.height});
  }

  const tip = el("div", {class: "tip", hidden: ""});
  const hideTip = () => { tip.hidden = true; };
  function showTip(x, y, texts) {
    tip.replaceChildren(...texts.map((text) => el("div", {}, text)));
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    tip.style.left = Math.max(4, Math.min(x + 14, innerWidth - box.width - 8)) + "px";
    tip.style.top = Math.max(4, Math.min(y + 14, innerHeight - box.height - 8)) + "px";
  }
  function pointAt(plot, lines, over, across, format) {
    const index = plot.cursor.idx;
    if (index === null || index === undefined || plot.cursor.left < 0) return;
    const box = plot.over.getBoundingClientRect();
    const texts = [`${over === "step" ? "step " : ""}${across(plot.data[0][index])}`];
    lines.forEach((line, at) => {
      const value = plot.data[at + 1][index];
      if (value !== null && value !== undefined) texts.push(`${line.label} ${format(value)}`);
    });
    showTip(box.left + plot.cursor.left, box.top + plot.cursor.top, texts);
  }

  // ---- timelines of the processes ---------------------------------------------------------------------------------------

  const LANE = 16, NAMES = 84, FOOT = 20;
  const parts = ["compute", "sync", "load", "update", "checkpoint"];
  const idleStates = new Set(["starting", "waiting", "finished", "stopped", "done", "left"]);

  function lanes(job, box) {
    const names = Object.keys(job.ranks).filter((name) => job.ranks[name].spans.length);
    if (!names.length) return;
    let canvas = box.querySelector("canvas");
    if (!canvas) {
      canvas = el("canvas", {class: "lanes", role: "img"});
      canvas.addEventListener("mousemove", (event) => laneAt(canvas, event));
      canvas.addEventListener("mouseleave", hideTip);
      box.append(canvas);
    }
    const width = Math.max(240, box.clientWidth - 30), height = names.length * LANE + FOOT, ratio = devicePixelRatio || 1;
    canvas.width = width * ratio; canvas.height = height * ratio; canvas.style.height = height + "px";
    canvas.style.width = width + "px";
    canvas.setAttribute("aria-label", `States of ${names.length} processes over ${seconds(job.seconds)}; the table below has the newest`);
    const draw = canvas.getContext("2d");
    draw.scale(ratio, ratio);
    draw.font = "12px system-ui, sans-serif";
    const end = Math.max(job.seconds, 1e-3), scale = (width - NAMES) / end;
    canvas.lanes = {job, names, scale};
    names.forEach((name, row) => {
      const top = row * LANE, rank = job.ranks[name];
      draw.fillStyle = colour("dim");
      draw.fillText(name, 0, top + 12, NAMES - 6);
      rank.spans.forEach(([from, state, shares], index) => {
        const until = index + 1 < rank.spans.length ? rank.spans[index + 1][0] : end;
        const x = NAMES + from * scale, wide = Math.max(0.5, (until - from) * scale);
        const bad = state === "lost" || state === "failed";
        const busy = !bad && !idleStates.has(state) && shares.length;
        draw.fillStyle = colour(bad ? "lost" : busy || idleStates.has(state) ? "idle" : "compute");
        draw.fillRect(x, top + 2, wide, LANE - 4);
        let above = 0;
        for (const [at, share] of busy ? shares.entries() : []) {
          draw.fillStyle = colour(parts[at]);
          draw.fillRect(x, top + 2 + (LANE - 4) * above / 100, wide, (LANE - 4) * share / 100);
          above += share;
        }
      });
    });
    draw.fillStyle = colour("ink");
    for (const each of job.checkpoints) draw.fillRect(NAMES + each.at * scale, 0, 1, names.length * LANE);
    draw.fillStyle = colour("dim");
    draw.fillText("0 s", NAMES, height - 5);
    const last = seconds(end);
    draw.fillText(last, width - draw.measureText(last).width, height - 5);
  }

  function laneAt(canvas, event) {
    const {job, names, scale} = canvas.lanes, box = canvas.getBoundingClientRect();
    const name = names[Math.floor((event.clientY - box.top) / LANE)], at = (event.clientX - box.left - NAMES) / scale;
    if (!name || at < 0) return hideTip();
    const span = job.ranks[name].spans.filter((each) => each[0] <= at).pop();
    if (!span) return hideTip();
    showTip(event.clientX, event.clientY, [`${name} at ${seconds(at)}`, span[1],
      ...span[2].map((share, index) => share ? `${share}% ${parts[index]}` : "").filter((text) => text)]);
  }

  // ---- tables -----------------------------------------------------------------------------------------------------------

  function table(heads, rows) {
    const cell = (tag, text, head) => el(tag, {class: head.kind || null, scope: tag === "th" ? "col" : null}, text);
    return el("div", {class: "scroll", tabindex: "0", role: "region", "aria-label": heads.title || "table"}, el("table", {},
      el("thead", {}, el("tr", {}, heads.columns.map((head) => cell("th", head.text, head)))),
      el("tbody", {}, rows.map((row) => el("tr", {class: row.chosen ? "chosen" : null},
        row.cells.map((text, index) => cell("td", text, heads.columns[index])))))));
  }
  const columns = (...texts) => texts.map((text) => text.startsWith("#") ? {text: text.slice(1), kind: "number"} :
    text.startsWith("*") ? {text: text.slice(1), kind: "wide"} : {text});
  const titled = (job, ...children) => el("div", {class: "card"}, el("h3", {}, job.job), ...children);

  // ---- sections -----------------------------------------------------------------------------------------------------------

  const sections = {};
  const jobs = () => Object.values(page.jobs);
  const stateClass = (state) => state === "done" ? "good" : state === "failed" ? "bad" : state === "running" ? "" : "dim";

  function overview() {
    return jobs().map((job) => titled(job,
      el("div", {}, el("strong", {class: stateClass(job.state)}, job.state), job.state === "starting" ? `, ${job.phase}` : "",
        ` · ${count(job.step)}${job.total ? " of " + count(job.total) : ""} steps in ${seconds(job.seconds)}`,
        job.left !== null ? ` · ${seconds(job.left)} left` : ""),
      job.problem ? el("div", {class: "warning"}, job.problem) : null,
      job.total ? el("progress", {max: job.total, value: job.step, "aria-label": `progress of ${job.job}`}) : null,
      el("dl", {}, [["cluster", `${job.cluster}: ${job.hosts.join(", ")}`],
        ["started", job.started ? new Date(job.started * 1000).toLocaleString() : "-"], ...job.summary].flatMap(
        ([name, text]) => [el("dt", {}, name), el("dd", {}, text)])),
      job.failure ? failure(job.failure) : null));
  }

  function failure(found) {
    const lines = [];
    for (const [name, value] of Object.entries(found)) {
      if (value === null || value === "" || (Array.isArray(value) && !value.length)) continue;
      const text = Array.isArray(value) ? "\n  " + value.map((each) => typeof each === "string" ? each : JSON.stringify(each)).join("\n  ") :
        typeof value === "object" ? JSON.stringify(value) : String(value);
      lines.push(`${name}: ${text}`);
    }
    return el("pre", {class: "bad"}, lines.join("\n"));
  }

  function drawCharts() {
    for (const held of charts.values()) held.used = false;
    const names = [...new Set(jobs().flatMap((job) => Object.keys(job.metrics)))];
    const several = jobs().length > 1;
    const of = (get, label) => jobs().map((job) => ({label: several ? job.job : label, series: get(job)}));
    names.forEach((name) => chart("m:" + name, name, of((job) => job.metrics[name], ""), metric, sections.metrics.body));
    const into = sections.throughput.body;
    chart("r:examples", "examples/s", of((job) => job.rates.examples_per_second, ""), count, into);
    chart("r:bytes", "bytes/s moved", of((job) => job.rates.bytes_per_second, ""), (value) => bytes(value) + "/s", into);
    for (const job of jobs()) {
      chart("r:split:" + job.job, several ? `${job.job}: seconds of a step` : "seconds of a step",
        ["compute", "sync", "hidden"].map((name) => ({label: name, series: job.rates[name]})), seconds, into);
    }
    for (const job of jobs()) {
      const named = (which) => Object.entries(job.traffic).map(([name, found]) => ({label: name, series: found[which]}));
      for (const [which, title] of [["sent", "sent by hosts"], ["received", "received by hosts"]]) {
        chart(`t:${which}:${job.job}`, several ? `${job.job}: ${title}` : title, named(which), (value) => bytes(value) + "/s",
          into, "time");
      }
    }
    for (const [id, held] of charts) {
      if (held.used) continue;
      if (held.plot) held.plot.destroy();
      held.figure.remove();
      charts.delete(id);
    }
  }

  const laneBoxes = new Map();
  function processes() {
    return jobs().map((job) => {
      if (!laneBoxes.has(job.job)) laneBoxes.set(job.job, el("div", {}));
      const rows = Object.entries(job.ranks).map(([name, rank]) => ({cells: [name, rank.host, rank.state, count(rank.step),
        rank.rate ? count(rank.rate) : "-", rank.memory ? rank.cpu + "%" : "-", rank.memory ? bytes(rank.memory) : "-",
        name.startsWith("worker") ? rank.sync + "%" : "-", rank.sends ? bytes(rank.sends) + "/s" : "-",
        rank.receives ? bytes(rank.receives) + "/s" : "-", rank.gpu_memory ? rank.gpu + "%" : "-",
        rank.gpu_memory ? bytes(rank.gpu_memory) : "-", rank.error]}));
      return titled(job, el("figcaption", {}, key("compute", "running, computing"), key("sync", "synchronization"),
        key("load", "loading"), key("update", "update"), key("checkpoint", "saving"), key("idle", "starting, waiting, outside of steps"), key("lost", "lost or failed"), key("ink", "checkpoint")),
        laneBoxes.get(job.job),
        table({title: `processes of ${job.job}`, columns: columns("process", "host", "state", "#step", "#steps/s", "#cpu", "#memory", "#sync", "#sends", "#receives", "#gpu", "#gpu memory", "*")}, rows));
    });
  }

  function plans() {
    return jobs().filter((job) => job.plan).map((job) => {
      const plan = job.plan, known = plan.candidates.map((each) => each.seconds).filter((each) => each !== null);
      const most = Math.max(...known, plan.measured || 0, 1e-9);
      const bar = (value) => value === null ? "" : el("meter", {min: 0, max: most, value, "aria-label": seconds(value)});
      const rows = plan.candidates.slice().sort((a, b) => (a.seconds ?? Infinity) - (b.seconds ?? Infinity)).map((each) => ({
        chosen: each.strategy === plan.chosen,
        cells: [each.strategy, each.params, each.seconds === null ? "-" : seconds(each.seconds), bar(each.seconds),
          bytes(each.bytes), each.why_not || each.bottleneck]}));
      if (plan.measured !== null) {
        rows.unshift({cells: [`${plan.chosen}, measured`, "mean of the run", seconds(plan.measured), bar(plan.measured), "",
          "waiting for synchronization, and synchronization hidden behind computation"]});
      }
      return titled(job, el("div", {}, el("strong", {}, plan.chosen), ` for ${bytes(plan.size)} of gradients, ${plan.world} workers: ${plan.reason}`),
        table({title: `plan of ${job.job}`, columns: columns("strategy", "", "#a step", "", "#bytes a rank", "*bottleneck, or why not")}, rows));
    });
  }

  // ---- the newest steps -----------------------------------------------------------------------------------------------

  const kinds = {load: "load", forward: "compute", backward: "compute", compute: "compute", synchronize: "sync", update: "update",
    checkpoint: "checkpoint", push: "push", pull: "pull"};
  const asked = new Map();

  function ask(job) {
    asked.set(job.job, "asking the hosts ...");
    update();
    fetch(`steps?job=${encodeURIComponent(job.job)}&token=${token()}`, {method: "POST"}).then(
      (answer) => answer.text(), () => "psctl ui cannot be reached").then((why) => { asked.set(job.job, why); update(); });
  }
  function newestSteps() {
    return jobs().filter((job) => job.steps || (given.live && job.state === "running")).map((job) => {
      const button = given.live && job.state === "running" ? el("button", {type: "button", on: {click: () => ask(job)}},
        job.steps ? "newer steps" : "show the newest steps") : null;
      return titled(job, el("div", {class: "tools"}, button, el("span", {role: "status", class: "dim"}, asked.get(job.job) || "")),
        job.steps ? stepTimes(job) : null);
    });
  }
  function stepTimes(job) {
    const {lanes, seconds: whole, paths, clock_error: error} = job.steps, names = Object.keys(lanes), left = 90;
    const wide = Math.max(520, document.body.clientWidth - 60);  // one unit is one pixel, so that texts keep their size
    const strips = {synchronize: [8, 12], push: [22, 4], pull: [27, 4]}, tall = 36;
    const image = shape("svg", {viewBox: `0 0 ${wide} ${names.length * tall + 24}`, class: "steps", role: "img",
      "aria-label": `parts of the newest ${paths.length} steps of ${names.length} workers; the table below has the critical path of each`});
    const place = (at) => left + (wide - left) * at / Math.max(whole, 1e-9);
    names.forEach((name, row) => {
      const y = row * tall;
      image.append(shape("text", {x: 0, y: y + 16}, clip(name, 12)));
      for (const [kind, step, begin, end] of lanes[name]) {
        const [below, height] = strips[kind] || [3, 18];
        const made = shape("rect", {x: place(begin), y: y + below, width: Math.max(0.5, place(end) - place(begin)), height, class: "part-" + kinds[kind] + (kind === "backward" ? " backward" : "")});
        made.append(shape("title", {}, `step ${step}: ${kind}, ${seconds(end - begin)}`));
        image.append(made);
      }
    });
    image.append(shape("text", {x: left, y: names.length * tall + 18}, "0 s"),
      shape("text", {x: wide, y: names.length * tall + 18, "text-anchor": "end"}, seconds(whole)));
    const hasServers = names.some((name) => lanes[name].some(([kind]) => kind === "push"));
    const rows = paths.map((path) => ({cells: [count(path.step), seconds(path.seconds), path.last, seconds(path.behind), seconds(path.load),
      seconds(path.wait), seconds(path.compute), seconds(path.after)]}));
    return el("div", {}, el("figcaption", {}, key("compute", "forward, backward"), key("sync", "synchronization"), key("load", "loading"),
      key("update", "update"), key("checkpoint", "saving"), ...(hasServers ? [key("push", "push"), key("pull", "pull")] : []),
      el("span", {class: "dim"}, error === null ?
        "clocks of hosts were not compared" : error === 0 ? "all times are of one clock" : `clocks of hosts agree to ${seconds(error)} or better`)),
      el("div", {class: "scroll", tabindex: "0", role: "region", "aria-label": `steps of ${job.job}`}, image),
      table({title: `critical paths of ${job.job}`, columns: columns("#step", "#took", "ready last", "#behind", "#load", "#wait", "#compute",
        "#sync, update")}, rows));
  }

  // ---- hosts and the traffic of their links -------------------------------------------------------------------------------

  function shape(tag, attributes, ...texts) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...texts);
    return made;
  }
  const networks = () => jobs().filter((job) => Object.keys(job.traffic).length || Object.keys(job.gpus).length).map((job) => titled(job, network(job)));
  const last = (series) => series.values.length ? series.values[series.values.length - 1] : 0;

  function network(job) {
    const names = job.hosts.length ? job.hosts : Object.keys(job.traffic), wide = 190, gap = 20, top = 46;
    const flows = job.flows.filter(([from, to]) => names.includes(from) && names.includes(to));
    const devices = Math.max(0, ...names.map((name) => (job.gpus[name] || []).length)), deep = 56 + 22 * Math.ceil(devices / 8);
    const tall = 72 + deep + (flows.length ? 46 : 0), strongest = Math.max(1, ...flows.map((flow) => flow[2]));
    const across = Math.max(1, Math.min(names.length, 6)), width = across * (wide + gap) - gap;
    const height = top + Math.ceil(names.length / across) * tall;
    const rates = names.map((name) => job.traffic[name]).filter((each) => each);
    const most = Math.max(1, ...rates.flatMap((each) => [last(each.sent), last(each.received), each.capacity]));
    const image = shape("svg", {viewBox: `0 0 ${width} ${height}`, width, class: "network", role: "img",
      "aria-label": `traffic of the hosts of ${job.job}`});
    image.append(shape("rect", {x: 0, y: 4, width, height: 22, rx: 6, class: "switch"}),
      shape("text", {x: width / 2, y: 19, "text-anchor": "middle"}, "network"));
    names.forEach((name, index) => {
      const x = (index % across) * (wide + gap), y = top + Math.floor(index / across) * tall + 46, found = job.traffic[name];
      const holds = Object.entries(job.ranks).filter(([, rank]) => rank.host === name).map(([rank]) => rank);
      const from = index < across ? 26 : y - tall + 6 + deep;
      image.append(shape("rect", {x, y, width: wide, height: deep, rx: 6, class: "host"}),
        shape("text", {x: x + wide / 2, y: y + 22, "text-anchor": "middle", class: "name"}, clip(name, 24)),
        shape("text", {x: x + wide / 2, y: y + 41, "text-anchor": "middle", class: "small"}, clip(holds.join(" ") || "-", 27)));
      (job.gpus[name] || []).forEach(([kind, busy, used, memory], at) => {
        const left = x + 8 + (at % 8) * 22, above = y + 50 + 22 * Math.floor(at / 8);
        const title = `GPU ${at}, ${kind}: ${busy === null ? "" : busy + "% busy, "}${bytes(used)} of ${bytes(memory)}`;
        const box = shape("g", {class: "gpu"}, shape("title", {}, title));
        box.append(shape("rect", {x: left, y: above, width: 18, height: 18, rx: 2, class: "host"}),
          shape("rect", {x: left, y: above + 18 * (1 - (busy || 0) / 100), width: 18, height: 18 * (busy || 0) / 100, class: "part-compute"}));
        image.append(box);
      });
      if (!found) return;
      for (const [at, mark, series, side] of [[0.44, "\u2191", found.sent, -1], [0.56, "\u2193", found.received, 1]]) {
        const rate = last(series), share = found.capacity ? rate / found.capacity : 0;
        const place = x + wide * at;
        image.append(shape("line", {x1: place, x2: place, y1: from, y2: y, class: share > 0.8 ? "link full" : "link",
          "stroke-width": Math.max(1, 14 * Math.min(1, rate / most))}),
          shape("text", {x: place + 11 * side, y: y - 8, "text-anchor": side > 0 ? "start" : "end", class: "small"},
            `${mark} ${bytes(rate)}/s`));
      }
    });
    const bottom = (name) => {
      const index = names.indexOf(name);
      return [(index % across) * (wide + gap) + wide / 2, top + Math.floor(index / across) * tall + 46 + deep];
    };
    flows.slice().sort((a, b) => b[2] - a[2]).slice(0, 40).forEach(([from, to, rate]) => {
      const [x0, y0] = bottom(from), [x1, y1] = bottom(to), apart = 8;
      const depth = Math.max(y0, y1) + (x0 < x1 ? 26 : 44) * (y0 === y1 ? 1 : 0.4);
      const path = shape("path", {d: `M ${x0 + apart} ${y0} Q ${(x0 + x1) / 2} ${2 * depth - (y0 + y1) / 2} ${x1 - apart} ${y1}`,
        class: x0 < x1 ? "flow" : "flow back", "stroke-width": Math.max(1, 8 * rate / strongest)});
      path.append(shape("title", {}, `${from} to ${to}: ${bytes(rate)}/s`));
      image.append(path);
    });
    const pairs = flows.slice().sort((a, b) => b[2] - a[2]).map(([from, to, rate]) => ({cells: [from, to, bytes(rate) + "/s"]}));
    const gpus = Object.entries(job.gpus).flatMap(([host, found]) => found.map(([kind, busy, used, memory], at) => ({cells: [host,
      String(at), kind, busy === null ? "-" : busy + "%", bytes(used), bytes(memory)]})));
    const rows = names.filter((name) => job.traffic[name]).map((name) => {
      const {sent, received, capacity} = job.traffic[name];
      const highest = (series) => bytes(Math.max(0, ...series.values)) + "/s";
      return {cells: [name, bytes(last(sent)) + "/s", highest(sent), bytes(last(received)) + "/s", highest(received),
        capacity ? bytes(capacity) + "/s" : "-"]};
    });
    return el("div", {}, image, table({title: `traffic of ${job.job}`,
      columns: columns("host", "#sends", "#most", "#receives", "#most", "#link, one direction")}, rows),
      pairs.length ? table({title: `traffic between pairs of hosts of ${job.job}`, columns: columns("from", "to", "#workers move")}, pairs) : null,
      gpus.length ? table({title: `GPUs of ${job.job}`, columns: columns("host", "#GPU", "*", "#busy", "#memory used", "#memory")}, gpus) : null);
  }
  const clip = (text, most) => text.length > most ? text.slice(0, most - 1) + "\u2026" : text;

  const checkpoints = () => jobs().filter((job) => job.checkpoints.length).map((job) => titled(job,
    table({title: `checkpoints of ${job.job}`, columns: columns("#step", "#after", "#size", "#took", "*path")},
      job.checkpoints.slice().reverse().map((each) => ({cells: [count(each.step), seconds(each.at), bytes(each.bytes),
        seconds(each.seconds), each.path]})))));

  const notes = () => jobs().filter((job) => job.notes.length).map((job) => titled(job,
    el("dl", {}, job.notes.slice().reverse().flatMap((each) => [el("dt", {}, seconds(each.at)),
      el("dd", {class: each.level}, each.text + (each.count > 1 ? ` (${each.count} times)` : ""))]))));

  const wanted = {job: "", rank: "", text: ""};
  const logBox = el("div", {class: "log", tabindex: "0", role: "region", "aria-label": "printed lines"});
  const jobChoice = el("select", {"aria-label": "job", on: {change: () => { wanted.job = jobChoice.value; wanted.rank = ""; logs(); }}});
  const rankChoice = el("select", {"aria-label": "process", on: {change: () => { wanted.rank = rankChoice.value; logs(); }}});
  const filter = el("input", {type: "text", placeholder: "filter", "aria-label": "only lines that contain", on: {input: () => {
    wanted.text = filter.value.toLowerCase(); logs(); }}});
  function options(select, values, chosen) {
    const now = [...select.options].map((each) => each.value).join("\n");
    if (now !== values.map(([value]) => value).join("\n")) {
      select.replaceChildren(...values.map(([value, text]) => el("option", {value}, text)));
    }
    select.value = chosen;
  }
  function logs() {
    const names = jobs().map((job) => job.job);
    if (!names.includes(wanted.job)) wanted.job = names[0] || "";
    const job = page.jobs[wanted.job];
    options(jobChoice, names.map((name) => [name, name]), wanted.job);
    options(rankChoice, [["", "all processes"], ...(job ? Object.keys(job.ranks).map((name) => [name, name]) : [])], wanted.rank);
    const lines = (job ? job.lines : []).filter(([, rank, , text]) => (!wanted.rank || rank === wanted.rank) &&
      (!wanted.text || text.toLowerCase().includes(wanted.text)));
    const atEnd = logBox.scrollTop + logBox.clientHeight >= logBox.scrollHeight - 8;
    logBox.replaceChildren(...(job && job.dropped ? [el("div", {class: "dim"}, `${count(job.dropped)} earlier lines are not here`)] : []),
      ...lines.map(([at, rank, stream, text]) => el("div", {class: stream === "stderr" ? "stderr" : null},
        el("span", {class: "dim"}, `${seconds(at).padStart(7)} ${rank} `), text)));
    if (atEnd) logBox.scrollTop = logBox.scrollHeight;
  }

  // ---- the page -----------------------------------------------------------------------------------------------------------

  const root = document.getElementById("page");
  const status = el("span", {class: "dim", role: "status"});
  const adding = el("select", {"aria-label": "show another job", on: {change: () => {
    if (adding.value) fetch(`open?job=${encodeURIComponent(adding.value)}&token=${token()}`, {method: "POST"});
  }}});
  const token = () => encodeURIComponent(new URLSearchParams(location.search).get("token") || "");

  function radio(name, text) {
    const made = el("input", {type: "radio", name: "axis", value: name, on: {change: () => { choices.axis = name; drawCharts(); }}});
    made.checked = choices.axis === name;
    return el("label", {}, made, " " + text);
  }
  function section(name, title, fill, tools, cards) {
    const body = el("div", {class: cards ? "cards" : null});
    const whole = el("section", {id: name, "aria-label": title}, el("h2", {}, title), tools || null, body);
    sections[name] = {whole, body, fill, title};
    return whole;
  }
  function build() {
    const log = el("input", {type: "checkbox", on: {change: () => { choices.log = log.checked; drawCharts(); }}});
    const all = [
      section("overview", "Jobs", overview, null, true),
      section("metrics", "Metrics", null, el("div", {class: "tools"}, radio("step", "over steps"), radio("time", "over time"),
        el("label", {}, log, " logarithmic")), true),
      section("throughput", "Throughput", null, null, true),
      section("processes", "Processes", processes),
      section("steps", "Newest steps: the worker that was ready last", newestSteps),
      section("network", "Network", networks),
      section("plan", "Plan: predicted and measured", plans),
      section("checkpoints", "Checkpoints", checkpoints),
      section("events", "Events", notes),
      section("logs", "Output", null, el("div", {class: "tools"}, jobChoice, rankChoice, filter)),
    ];
    sections.logs.body.append(logBox);
    root.replaceChildren(el("header", {}, el("h1", {}, "psctl"), el("nav", {"aria-label": "sections"}, Object.entries(sections).map(
      ([name, each]) => el("a", {href: "#" + name}, each.title.split(":")[0]))), given.live ? adding : null, status), ...all, tip);
  }
  function update() {
    for (const each of Object.values(sections)) {
      if (!each.fill) continue;
      const made = each.fill();
      each.body.replaceChildren(...made);
      each.whole.hidden = !made.length;
    }
    for (const job of jobs()) if (laneBoxes.has(job.job)) lanes(job, laneBoxes.get(job.job));
    drawCharts();
    sections.metrics.whole.hidden = !sections.metrics.body.children.length;
    sections.throughput.whole.hidden = !sections.throughput.body.children.length;
    logs();
    if (given.live) {
      const others = page.known.filter((each) => !page.jobs[each.job]);
      options(adding, [["", "show another job ..."], ...others.map((each) => [each.job, `${each.job} (${each.state})`])], "");
      adding.hidden = !others.length;
    }
    status.textContent = lost ? "psctl ui has ended, or cannot be reached" : given.live ? "live" : "";
    status.className = lost ? "bad" : "dim";
  }

  // ---- changes ------------------------------------------------------------------------------------------------------------

  function changed(value, change) {
    if (change[0] === "=") return change[1];
    if (change[0] === "+") return value.concat(change[1]);
    const made = {...value};
    for (const name of change[2]) delete made[name];
    for (const [name, each] of Object.entries(change[1])) made[name] = changed(made[name], each);
    return made;
  }
  let due = false;
  function soon() {
    if (due) return;
    due = true;
    setTimeout(() => { due = false; update(); }, document.hidden ? 2000 : 50);
  }
  function follow() {
    const stream = new EventSource(`changes?token=${token()}`);
    stream.onmessage = (event) => { lost = false; page = changed(page, JSON.parse(event.data)); soon(); };
    stream.onerror = () => { lost = true; soon(); };
    stream.onopen = () => { lost = false; soon(); };
  }

  let width = innerWidth;
  function redraw() {
    for (const held of charts.values()) held.shape = "";
    update();
  }
  addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; redraw(); } });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  build();
  update();
  if (given.live) follow();
})();
