"""The page's style and its one script: light and dark, 400 to 1400 pixels wide, nothing fetched."""

STYLE = """
:root{color-scheme:light dark;--bg:#f6f7f9;--card:#fff;--ink:#1b2330;--soft:#5d6878;--line:#e3e7ec;--hot:#d1495b;
--c0:#1769aa;--c1:#d9730d;--c2:#2a8c55;--c3:#a23b9c;--c4:#8a6d1d;--c5:#c2185b;--c6:#00838f;--c7:#6b7280;
--s0:#35507a;--s1:#4f7cac;--s2:#8fb3d4;--s3:#2f8f83;--s4:#e0a33e;--s5:#d9734e;--s6:#a55b8f;--s7:#8b95a5;--s8:#c9ced6}
@media(prefers-color-scheme:dark){:root{--bg:#11151b;--card:#1a2029;--ink:#e6eaf0;--soft:#98a3b3;--line:#2c3542;
--hot:#ff6b7d;--c0:#62b0f0;--c1:#ffa657;--c2:#5fd08f;--c3:#d98be0;--c4:#d8bd62;--c5:#ff7fab;--c6:#4dd0e1;--c7:#a3acb9;
--s0:#5b7db1;--s1:#7ba3d0;--s2:#b1cce6;--s3:#4fb8aa;--s4:#edbb63;--s5:#ee946f;--s6:#c584b2;--s7:#8b95a5;--s8:#5a6473}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1360px;margin:0 auto;padding:20px clamp(12px,2.5vw,32px) 60px}
h1{font-size:26px;margin:.2em 0 .1em}h2{font-size:18px;margin:34px 0 10px}
p{margin:.3em 0}small,.note,.axis,.soft{color:var(--soft);font-weight:400;font-size:12.5px}
.grid{display:grid;gap:14px;grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr))}
.panels{display:grid;gap:14px;margin:10px 0 14px;grid-template-columns:repeat(auto-fit,minmax(min(100%,300px),1fr))}
.card,.chart{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:14px 16px;margin:0;
min-width:0}
.scroll{overflow-x:auto}.wide{grid-column:1/-1}
figcaption{font-weight:600}
.keys{display:flex;flex-wrap:wrap;gap:2px 14px;font-size:12.5px;margin:4px 0 10px;min-height:1.4em}
.key:before{content:"";display:inline-block;width:16px;height:3px;border-radius:2px;margin-right:6px;vertical-align:middle;
background:var(--c)}
.key.dots:before{width:8px;height:8px;border-radius:50%}.key.area:before{width:10px;height:10px;border-radius:2px}
.key.dashed:before{background:repeating-linear-gradient(90deg,var(--c) 0 4px,transparent 4px 7px)}
.plot{position:relative;height:210px;margin:0 2px 24px 46px;border-bottom:1px solid var(--soft);touch-action:pan-y}
.tall .plot{height:280px}
.plot svg{position:absolute;inset:0;width:100%;height:100%;overflow:hidden;display:block}
path{fill:none;stroke:var(--c);stroke-width:1.8;vector-effect:non-scaling-stroke;stroke-linejoin:round;stroke-linecap:round}
path.grid{stroke:var(--line);stroke-width:1}path.faint{stroke-width:1;opacity:.28}path.dots{stroke-width:7}
path.dashed{stroke-dasharray:4 4}path.area{fill:var(--c);stroke:none}path.steps{stroke-width:1.6}
.plot i{position:absolute;font-style:normal;font-size:11.5px;color:var(--soft);white-space:nowrap;line-height:1}
.plot i.y{right:100%;margin-right:7px;transform:translateY(-50%)}
.plot i.x{top:100%;margin-top:7px;transform:translateX(-50%)}.plot i[style^=right]{transform:none}
.axis{text-align:right;margin-top:-10px}.tall .axis{display:none}
.tip{position:absolute;z-index:2;pointer-events:none;background:var(--card);border:1px solid var(--line);
border-radius:8px;padding:6px 9px;font-size:12px;line-height:1.45;box-shadow:0 4px 14px #0003;white-space:nowrap;
top:6px}
.tip b{display:inline-block;width:8px;height:8px;border-radius:2px;margin-right:6px}
.rule{position:absolute;top:0;bottom:0;width:1px;background:var(--soft);pointer-events:none}
table{border-collapse:collapse;width:100%;font-size:13.5px;font-variant-numeric:tabular-nums}
th,td{padding:5px 10px;text-align:right;border-bottom:1px solid var(--line);vertical-align:top}
th:first-child,td:first-child{text-align:left;color:var(--soft);font-weight:400;padding-left:0}
tr:last-child>*{border-bottom:0}thead th{font-weight:600}td.text{text-align:left;overflow-wrap:anywhere}
.run:before{content:"";display:inline-block;width:10px;height:10px;border-radius:3px;background:var(--c);margin-right:7px}
.heat{max-height:460px;overflow:auto}.heat table{font-size:12px}.heat td,.heat th{padding:3px 6px;text-align:center}
.heat thead th{position:sticky;top:0;background:var(--card);overflow-wrap:anywhere}
.heat td[title]{background:color-mix(in srgb,var(--hot) calc(var(--v)*1%),transparent)}
pre{white-space:pre-wrap;overflow-wrap:anywhere;font:12.5px/1.5 ui-monospace,SFMono-Regular,Menlo,monospace;
margin:8px 0 0}
summary{cursor:pointer}
"""

SCRIPT = """
const short=v=>Math.abs(v)>=1e9?(v/1e9).toPrecision(4)+' G':Math.abs(v)>=1e6?(v/1e6).toPrecision(4)+' M':
  Math.abs(v)>=1e4?Math.round(v).toLocaleString('en'):String(+v.toPrecision(4));
const node=(kind,parent)=>{const made=document.createElement('div');made.className=kind;parent.append(made);
  return made};
for(const plot of document.querySelectorAll('.plot')){
  const data=JSON.parse(plot.dataset.chart);let tip,rule;
  const clear=()=>{tip&&tip.remove();rule&&rule.remove();tip=rule=null};
  plot.addEventListener('pointerleave',clear);
  plot.addEventListener('pointermove',event=>{
    const box=plot.getBoundingClientRect(),part=Math.min(1,Math.max(0,(event.clientX-box.left)/box.width));
    let x=data.x[0]+part*(data.x[1]-data.x[0]);if(data.labels)x=Math.min(data.labels.length-1,Math.floor(x));
    tip=tip||node('tip',plot);rule=rule||node('rule',plot);rule.style.left=100*part+'%';
    const near=one=>one.p.reduce((a,b)=>Math.abs(b[0]-x)<Math.abs(a[0]-x)?b:a);
    tip.textContent=data.labels?data.labels[x]:data.name+' '+short(near(data.series[0])[0]);
    data.series.forEach((one,place)=>{
      const point=near(one),below=data.series[place+1];
      if(one.look=='dots'&&Math.abs(point[0]-x)>.02*(data.x[1]-data.x[0]))return;
      const row=node('',tip),mark=document.createElement('b');mark.style.background='var(--'+one.c+')';
      const value=point[1]-(one.look=='area'&&below&&below.look=='area'?near(below)[1]:0);
      row.append(mark,one.n+'  '+short(value))});
    const left=part<.5;tip.style.left=left?'calc('+100*part+'% + 12px)':'auto';
    tip.style.right=left?'auto':'calc('+100*(1-part)+'% + 12px)'});
}
"""
